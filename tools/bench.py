"""`tandem bench`: the options, and which bench they ask for.

Knows no measuring: on a CPU that is tools.bench_cpu, on a GPU tools.gpu_bench. Each is imported only when
it runs.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from common.device_name import check_device_name
from common.errors import ConfigError
from tools.gpu_bench.plan import levels, make_plan
from tools.launch import DEFAULT_DRAFT, DEFAULT_MODEL, check_json_path, leave_on_sigterm

app = typer.Typer(add_completion=False)

CPU_NEW_TOKENS = 96
_GPU = "GPU"


class Peer(enum.StrEnum):
    """Other implementations that can run beside ours."""

    TRANSFORMERS = "transformers"


@app.command(
    epilog="Examples:  tandem bench --peer transformers  |  "
    "tandem bench --concurrency 1,4 --json bench.json  |  tandem bench --temperature 0.8 --top-p 0.95  |  "
    "tandem bench --device cuda --random qwen3-8b --synthetic-accept-length 8.01"
)
def bench(
    model: Annotated[
        str | None, typer.Option(help=f"Target: a directory or a Hugging Face id. On a CPU {DEFAULT_MODEL}.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help=f"Draft: a directory or a Hugging Face id. On a CPU {DEFAULT_DRAFT}.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Requests at once; several, separated by commas. 1, on a GPU 1,8,32.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each answer; none ends early. 96, on a GPU 384.", min=8)
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Times that each row is measured; medians are shown.", min=1)
    ] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0, max=100.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; only counts above temperature 0.", max=1.0)] = 1.0,
    device: Annotated[
        str, typer.Option(help="cpu measures the services; cuda or cuda:N the core.")
    ] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads of each implementation; 0 leaves it to the library.", min=0),
    ] = None,
    peer: Annotated[Peer | None, typer.Option(help="Measure this beside ours (CPU, greedy only).")] = None,
    random: Annotated[
        str | None,
        typer.Option(help="Random weights of this shape, e.g. qwen3-8b.", rich_help_panel=_GPU),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(help="Some of plain,inprocess,inline,device. Default: all.", rich_help_panel=_GPU),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each random prompt; a trained model's are no longer. Default 128.",
            min=1,
            rich_help_panel=_GPU,
        ),
    ] = None,
    synthetic_accept_length: Annotated[
        float | None,
        typer.Option(help="Take drafts for accepted at this mean length.", rich_help_panel=_GPU),
    ] = None,
    row_independent: Annotated[
        bool, typer.Option(help="A row's bits do not depend on its company.", rich_help_panel=_GPU)
    ] = False,
    streaming: Annotated[
        str | None,
        typer.Option(help="Core against gRPC clients, this many at once.", rich_help_panel=_GPU),
    ] = None,
    identity: Annotated[
        int | None,
        typer.Option(help="Compare tokens over this many random prompts.", min=1, rich_help_panel=_GPU),
    ] = None,
    soak: Annotated[
        int | None,
        typer.Option(help="Run this many steps of joins, leaves, cancels.", min=1, rich_help_panel=_GPU),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the results here.", dir_okay=False)
    ] = None,
) -> None:
    """Measure decode speed, plain and with drafts.

    On a CPU: on services started for the purpose; a rate counts from the first token to the last; exit
    status 1 when drafts change a token. On a GPU: a closed loop inside the core, for each way of handing
    over, with the share of the memory floor; or streaming, identity or soak.
    """
    console = Console(highlight=False)
    check_json_path(json_path)
    check_device_name(device)
    if device != "cpu":
        _refuse({"threads": threads, "peer": peer}, "is for --device cpu")
        gpu_plan = make_plan(
            device=device,
            random_shape=random,
            model=model,
            draft=draft,
            modes=modes,
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            num_rounds=rounds,
            synthetic_accept_length=synthetic_accept_length,
            row_independent=row_independent,
            streaming=streaming,
            identity=identity,
            soak=soak,
            temperature=temperature,
            top_p=top_p,
        )
        # Imported here: torch takes seconds, and a wrong option need not wait for it.
        from tools.gpu_bench.run import bench_gpu

        bench_gpu(console, gpu_plan, json_path)
        return
    _refuse(
        {
            "random": random,
            "modes": modes,
            "prompt_tokens": prompt_tokens,
            "synthetic_accept_length": synthetic_accept_length,
            "row_independent": row_independent or None,
            "streaming": streaming,
            "identity": identity,
            "soak": soak,
        },
        "needs --device cuda",
    )
    from tools.bench_cpu import CpuPlan, bench_cpu

    leave_on_sigterm()
    cpu_plan = CpuPlan(
        model=model or DEFAULT_MODEL,
        draft=draft or DEFAULT_DRAFT,
        concurrency=levels(concurrency or "1", "concurrency"),
        max_new_tokens=max_new_tokens or CPU_NEW_TOKENS,
        num_rounds=rounds,
        temperature=temperature,
        top_p=top_p,
        threads=threads or 0,
        peer=peer is not None,
    )
    bench_cpu(console, cpu_plan, json_path)


def _refuse(given: dict[str, Any], problem: str) -> None:
    """ConfigError for the first option that was given."""
    for field, value in given.items():
        if value is not None:
            raise ConfigError(field, problem, given=value)
