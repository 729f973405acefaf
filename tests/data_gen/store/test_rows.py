"""Rows on disk keep the precision that their module states, and files of earlier versions are read."""

import torch

from data_gen.responses.exchange import Exchange
from data_gen.store.rows import POSITION_COLUMNS, read_rows, to_parquet

COUNT = 4000


def test_numbers_keep_the_stated_precision_and_ids_are_exact(tmp_path):
    columns = {name: torch.rand(COUNT) for name in POSITION_COLUMNS}
    columns["log_p"] = -30 * columns["log_p"]
    columns["log_p"][7] = -torch.inf
    columns["acceptance_prob"][:3] = torch.tensor([0.0, 1.0, 1e-7])
    columns["draft_ids"] = torch.randint(0, 152_000, (COUNT,))
    exchange = Exchange("a", "text", [1, 2], torch.randint(0, 152_000, (COUNT,)).tolist(), "length")
    path = tmp_path / "rows.parquet"
    path.write_bytes(to_parquet([exchange], columns | {"from_target": torch.zeros(COUNT).bool()}))
    row = read_rows(path).to_pylist()[0]
    assert row["response_ids"] == exchange.response_ids
    assert row["draft_ids"] == columns["draft_ids"].tolist()
    for name in POSITION_COLUMNS:
        rtol = 2**-16 if "entropy" in name else 2**-11
        torch.testing.assert_close(torch.tensor(row[name]), columns[name], rtol=rtol, atol=3e-8)
