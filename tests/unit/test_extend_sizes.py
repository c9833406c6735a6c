"""Which prompt batches get graphs, and which of them a batch takes."""

from __future__ import annotations

import pytest

from common.graphs import buckets_up_to
from services.target.core.extend_sizes import extend_size_for, extend_sizes


def test_a_batch_takes_the_smallest_graph_that_holds_its_rows_and_its_prompts() -> None:
    sizes = extend_sizes(buckets_up_to(256), 8)
    assert sizes[0] == (16, 1) and sizes[-1] == (256, 8)
    for num_rows, num_extends, wanted in (
        (1, 1, (16, 1)), (17, 1, (24, 2)), (24, 2, (24, 2)), (2, 2, (24, 2)), (7, 7, (128, 8)),
        (200, 1, (256, 8)),
    ):  # fmt: skip
        assert extend_size_for(sizes, num_rows, num_extends) == wanted
    for num_rows, num_extends in ((257, 1), (9, 9)):
        with pytest.raises(AssertionError, match="are more than"):
            extend_size_for(sizes, num_rows, num_extends)


def test_the_largest_graph_takes_all_prompts_however_few_its_rows() -> None:
    assert extend_sizes(buckets_up_to(8), 5) == [(8, 5)]
    assert extend_sizes([16, 24], 5) == [(16, 1), (24, 5)]
