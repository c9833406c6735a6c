"""`tandem demo`: both services as real processes answer a few prompts, beside plain decoding.

Composition only: starts the stack, streams, measures, prints, writes the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from tools.chat import ChatTokenizer
from tools.demo_view import AnswerPrinter, print_legend, result_table
from tools.launch import (
    DEFAULT_DRAFT,
    DEFAULT_MODEL,
    check_json_path,
    existing_dirs,
    leave_on_sigterm,
    report_drafter,
    start_stack,
    wait_for_drafter,
)
from tools.sample_prompts import SAMPLE_PROMPTS
from tools.side_by_side import Comparison, accept_length, compare, speedup
from tools.target_client import GenerateOptions, TargetClient

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Examples:  tandem demo  |  tandem demo --prompt 'Name three rivers.' --temperature 0.7  |  "
    "tandem demo --json demo.json --max-new-tokens 32"
)
def demo(
    model: Annotated[
        str, typer.Option(help="Target: a model directory or a Hugging Face id.")
    ] = DEFAULT_MODEL,
    draft: Annotated[str, typer.Option(help="Draft: a directory or a Hugging Face id.")] = DEFAULT_DRAFT,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Ask this instead of the samples; repeatable.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0, max=100.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; only counts above temperature 0.", max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Key of the sampling noise.", min=0)] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens an answer may have.", min=2)] = 64,
    rounds: Annotated[int, typer.Option(help="Measurements of each prompt in each mode.", min=1)] = 2,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the results here.", dir_okay=False)
    ] = None,
) -> None:
    """Start a drafter and a target, stream answers with accepted draft tokens coloured, then measure each
    prompt with and without drafts. Exit status 1 when the two ever differ in a token."""
    leave_on_sigterm()
    console = Console(highlight=False)
    prompts = prompt or list(SAMPLE_PROMPTS)
    check_json_path(json_path)
    model_dir, draft_dir = existing_dirs(model, draft)
    tokenizer = ChatTokenizer(model_dir)
    prompt_ids = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in prompts]
    options = GenerateOptions(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    try:
        with start_stack(console, model_dir, draft_dir) as stack:
            with TargetClient(stack.target.address) as client:
                report_drafter(console, wait_for_drafter(client))
                stream_answers(console, client, tokenizer, prompts, prompt_ids, options)
                comparisons = measure(console, client, prompt_ids, options, rounds)
    except KeyboardInterrupt:
        console.print("\ninterrupted; both services have ended")
        raise typer.Exit(130) from None
    console.print(result_table(prompts, comparisons))
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(prompts, comparisons), indent=2) + "\n", encoding="utf-8")
    if not all(c.same_tokens for c in comparisons):
        console.print("[bold red]plain and drafted tokens differ: this must never happen[/]")
        raise typer.Exit(1)


def stream_answers(
    console: Console,
    client: TargetClient,
    tokenizer: ChatTokenizer,
    prompts: Sequence[str],
    prompt_ids: Sequence[list[int]],
    options: GenerateOptions,
) -> None:
    """Print each prompt and its answer while it is generated. Also the warm-up of what is measured later."""
    print_legend(console)
    for text, ids in zip(prompts, prompt_ids, strict=True):
        console.print()
        console.print(Text(f"> {text}", style="bold"))
        printer = AnswerPrinter(console, tokenizer)
        finished = client.generate(ids, options, printer.push).finished
        printer.finish()
        console.print(
            Text(
                f"[{finished.num_output_tokens} tokens in {finished.num_decode_steps} steps, "
                f"{finished.num_accepted_tokens} of them from drafts]",
                style="dim",
            )
        )


def measure(
    console: Console,
    client: TargetClient,
    prompt_ids: Sequence[list[int]],
    options: GenerateOptions,
    num_rounds: int,
) -> list[Comparison]:
    """Each prompt plain and drafted, in turn, with a progress bar."""
    # The streamed answers warmed the drafted path; this warms the plain one.
    client.generate(prompt_ids[0], GenerateOptions(max_new_tokens=8, seed=0, drafting=False))
    console.print()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A bar that redraws ten times a second is work on the very cores that are measured: once is enough.
    with Progress(*columns, console=console, transient=True, refresh_per_second=1) as progress:
        task = progress.add_task("measuring", total=2 * num_rounds * len(prompt_ids))
        return [
            compare(client, ids, options, num_rounds=num_rounds, on_answer=lambda _: progress.advance(task))
            for ids in prompt_ids
        ]


def as_json(prompts: Sequence[str], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The results as `--json` writes them."""
    return {
        "prompts": [
            {
                "prompt": text,
                "tokens": c.num_tokens,
                "accept_length": accept_length([answer.finished for answer in c.drafted]),
                "plain_tok_s": c.plain_tok_s,
                "tandem_tok_s": c.drafted_tok_s,
                "same_tokens": c.same_tokens,
            }
            for text, c in zip(prompts, comparisons, strict=True)
        ],
        "accept_length": accept_length([answer.finished for c in comparisons for answer in c.drafted]),
        "speedup": speedup(comparisons),
        "same_tokens": all(c.same_tokens for c in comparisons),
    }
