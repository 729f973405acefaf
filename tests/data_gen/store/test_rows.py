"""Rows on disk keep the precision that their module states, and files of earlier versions are read."""

import pyarrow as pa
import pyarrow.parquet as pq
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
    path.write_bytes(to_parquet([exchange], columns, from_target=torch.zeros(COUNT).bool()))
    row = read_rows(path).to_pylist()[0]
    assert row["response_ids"] == exchange.response_ids
    assert row["draft_ids"] == columns["draft_ids"].tolist()
    for name in POSITION_COLUMNS:
        rtol = 2**-16 if "entropy" in name else 2**-11
        torch.testing.assert_close(torch.tensor(row[name]), columns[name], rtol=rtol, atol=3e-8)


def test_files_with_float32_throughout_are_read_as_before(tmp_path):
    values = [0.1, 0.2, float("-inf")]
    columns = {"id": ["a"], "log_p": pa.array([values], pa.list_(pa.float32())), "entropy": pa.nulls(1)}
    pq.write_table(pa.table(columns), tmp_path / "old.parquet")
    table = read_rows(tmp_path / "old.parquet")
    assert table["log_p"].to_pylist() == [torch.tensor(values).tolist()]
    assert table["entropy"].to_pylist() == [None]
