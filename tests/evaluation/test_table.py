"""One printer: cells stand under their headings, gains spread into three columns."""

import json
from dataclasses import dataclass

from evaluation.gain import Gain
from evaluation.table import Table, crossed, flat, shown, wide_console

GAIN = Gain(0.25, 0.1, 0.4, 0.05)


@dataclass
class Record:
    family: str
    gain: Gain
    tokens_per_s: float


def test_a_table_prints_every_cell_under_its_heading_and_what_is_absent_as_nothing(capsys):
    table = Table("speeds", [{"policy": "a", "gain": GAIN.text}, {"policy": "b", "tokens/s": "1.0"}], "of two")
    assert table.columns == ["policy", "gain", "tokens/s"]
    assert table.column("gain") == ["+25.0% (+10.0%, +40.0%)", ""]
    table.print()
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert cells == [["a", GAIN.text, ""], ["b", "", "1.0"]]
    assert json.loads(json.dumps(table.as_dict())) == {"title": "speeds", "rows": table.rows, "note": "of two"}
    empty = Table("none", [], headings=("policy", "gain")).table()
    assert [column.header for column in empty.columns] == ["policy", "gain"]
    assert wide_console().width >= 190, "a table in a pipe is wide"


def test_records_become_columns_of_a_file_and_cells_of_a_table():
    figures = {"gain": 0.25, "gain_low": 0.1, "gain_high": 0.4}
    assert flat(Record("a", GAIN, 2.0)) == {"family": "a", **figures, "tokens_per_s": 2.0}
    assert Gain(0.204, 0.166, -0.004, 0.0).words == "+20 % (17, 0)"
    columns = {"policy": ("family", ""), "N": ("num", ","), "speed-up": ("speed_up", ".2f")}
    rows = shown([{"family": "a", "num": 1234, "speed_up": None}], columns)
    assert rows == [{"policy": "a", "N": "1,234", "speed-up": ""}]
    cells = [("b", "batch 1", "x"), ("b", "batch 4", "y"), ("a", "batch 4", "z")]
    first = {"policy": "b", "batch 1": "x", "batch 4": "y"}
    assert crossed("policy", cells) == [first, {"policy": "a", "batch 4": "z"}]
