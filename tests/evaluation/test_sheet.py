"""One printer and one choice: cells stand under their headings, gains spread into three columns, the first of equals is
chosen.
"""

import json
from dataclasses import dataclass

from evaluation.gain import Gain
from evaluation.table import Table, crossed, flat, shown

GAIN = Gain(0.25, 0.1, 0.4, 0.05)


@dataclass
class Record:
    family: str
    gain: Gain
    tokens_per_s: float


def test_a_sheet_prints_every_cell_under_its_heading_and_what_is_absent_as_nothing(capsys):
    sheet = Table("speeds", [{"policy": "a", "gain": GAIN.text}, {"policy": "b", "tokens/s": "1.0"}], "of two")
    assert sheet.columns == ["policy", "gain", "tokens/s"]
    assert sheet.column("gain") == ["+25.0% (+10.0%, +40.0%)", ""]
    sheet.print()
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [[cell.strip() for cell in line.strip("│").split("│")] for line in lines] == [
        ["a", GAIN.text, ""],
        ["b", "", "1.0"],
    ]
    assert json.loads(json.dumps(sheet.as_dict())) == {"title": "speeds", "rows": sheet.rows, "note": "of two"}


def test_a_sheet_without_rows_still_has_its_headings():
    assert [column.header for column in Table("none", [], headings=("policy", "gain")).table().columns] == [
        "policy",
        "gain",
    ]


def test_a_gain_is_three_columns_of_a_file():
    assert flat(Record("a", GAIN, 2.0)) == {
        "family": "a",
        "gain": 0.25,
        "gain_low": 0.1,
        "gain_high": 0.4,
        "tokens_per_s": 2.0,
    }


def test_values_are_shown_in_the_form_of_their_columns():
    columns = {"policy": ("family", ""), "N": ("num", ","), "speed-up": ("speed_up", ".2f")}
    assert shown([{"family": "a", "num": 1234, "speed_up": None}], columns) == [
        {"policy": "a", "N": "1,234", "speed-up": ""}
    ]


def test_cells_cross_in_order_of_first_appearance():
    cells = [("b", "batch 1", "x"), ("b", "batch 4", "y"), ("a", "batch 4", "z")]
    assert crossed("policy", cells) == [
        {"policy": "b", "batch 1": "x", "batch 4": "y"},
        {"policy": "a", "batch 4": "z"},
    ]
