"""How the demo looks: streamed answers with accepted draft tokens coloured, and the closing table.

Gets tokens and numbers, prints; must not measure or call anything.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.chat import ChatTokenizer, TextStream
from tools.side_by_side import Comparison, accept_length, overall_tok_s, speedup
from tools.target_client import ReceivedDelta

DRAFT_STYLE = "bold green"
OWN_STYLE = "default"
# A model may write anything, also what a terminal obeys; newline and tab stay.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_PROMPT_CHARS, _PROMPT_COLUMN_CHARS = 64, 36


def print_legend(console: Console) -> None:
    """What the colours mean, or why there are none."""
    if console.color_system is None:
        console.print("(no colours here: in a terminal, accepted draft tokens are green)")
        return
    console.print(
        Text.assemble(
            ("accepted draft tokens", DRAFT_STYLE),
            " are green, ",
            ("the target's own", OWN_STYLE),
            " are not",
        )
    )


class AnswerPrinter:
    """Prints one answer while it arrives. A character split over tokens takes its last one's colour."""

    def __init__(self, console: Console, tokenizer: ChatTokenizer) -> None:
        self._console = console
        self._text = TextStream(tokenizer)

    def push(self, delta: ReceivedDelta) -> None:
        """Print the text that these tokens complete."""
        for token, drafted in zip(delta.token_ids, delta.from_draft, strict=True):
            self._print(self._text.push([token]), DRAFT_STYLE if drafted else OWN_STYLE)

    def finish(self) -> None:
        """Print what was held back and end the line."""
        self._print(self._text.finish(), OWN_STYLE)
        self._console.print()

    def _print(self, piece: str, style: str) -> None:
        # Text, never markup: a model may well write "[bold]". soft_wrap, since each print is a fragment.
        if piece:
            self._console.print(Text(piece.translate(_CONTROLS), style=style), end="", soft_wrap=True)


def result_table(prompts: Sequence[str], comparisons: Sequence[Comparison]) -> Table:
    """One line for each prompt and one for all of them."""
    table = Table(title="decoding, plain and with drafts (medians; prefill left out)", show_footer=True)
    finished = [answer.finished for c in comparisons for answer in c.drafted]
    plain_tok_s, drafted_tok_s = overall_tok_s(comparisons)
    all_same = all(c.same_tokens for c in comparisons)
    table.add_column("prompt", footer="all", max_width=_PROMPT_COLUMN_CHARS)
    # Numbers are never shortened; on a narrow terminal the prompt takes more lines.
    for heading, total_text in (
        ("tokens", str(sum(c.num_tokens for c in comparisons))),
        ("accept\nlength", f"{accept_length(finished):.2f}"),
        ("plain\ntok/s", f"{plain_tok_s:.1f}"),
        ("tandem\ntok/s", f"{drafted_tok_s:.1f}"),
        ("speed-\nup", f"{speedup(comparisons):.2f}x"),
        ("same\ntokens", _yes_no(all_same)),
    ):
        table.add_column(heading, footer=total_text, justify="right", no_wrap=True)
    for prompt, c in zip(prompts, comparisons, strict=True):
        table.add_row(
            Text(textwrap.shorten(prompt, _PROMPT_CHARS, placeholder=" …")),
            str(c.num_tokens),
            f"{accept_length([answer.finished for answer in c.drafted]):.2f}",
            f"{c.plain_tok_s:.1f}",
            f"{c.drafted_tok_s:.1f}",
            f"{speedup([c]):.2f}x",
            _yes_no(c.same_tokens),
        )
    return table


def _yes_no(value: bool) -> Text:
    return Text("yes", style="green") if value else Text("NO", style="bold red")
