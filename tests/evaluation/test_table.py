"""Tables print their cells as they are."""

from evaluation.table import Table


def test_brackets_in_names_are_printed_and_no_markup(capsys):
    Table("runs[a]", [{"head[s]": "runs[a]/best", "gain": "[bold]+1 %[/bold]"}], "of [b] only").print()
    printed = capsys.readouterr().out
    for text in ("runs[a]", "head[s]", "runs[a]/best", "[bold]+1 %[/bold]", "of [b] only"):
        assert text in printed
