"""`kvfs plan`: the ledger of KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from kvfs.tiers.replay import Trace
from mount_tools.arguments import complete_mountpoint
from mount_tools.common import (
    format_size,
    parse_path,
    parse_size,
    print_facts,
    print_json,
    print_table,
)
from mount_tools.doctor.system import System
from mount_tools.plan import machine
from mount_tools.plan.ledger import Endurance, SessionPlan, Tiers, endure, plan_session
from mount_tools.plan.machine import Found, Place
from mount_tools.plan.model import BITS, ConfigError, Model, dtype_named, plain_model, read_model
from mount_tools.plan.workload import Workload, measure
from mount_tools.traces import read_trace

_TOKENS = (4096, 32768, 102400)
_WRITE_AMPLIFICATION = 1.13
"""Random sessions at 85 % (docs/bench/results.md, row 9c)."""
_TERA = 1e12
_TIER_COLUMNS = ("tier", "room for KV", "read at", "known from")
_SESSION_COLUMNS = (
    "tokens", "stored", "to resume", "fit hot", "fit warm", "fit cold", "resume warm",
    "resume cold", "computed anew", "gain",
)  # fmt: skip


def plan(
    model_path: Annotated[
        Path | None,
        typer.Argument(
            parser=parse_path,
            metavar="MODEL",
            help="A model's config.json, or the folder that holds it.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Instead of MODEL: layers with KV.", show_default=False
        ),
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="KV heads of a layer.", show_default=False),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Numbers of a head.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "--kv-dtype",
            metavar="TYPE",
            help=f"Element type of the KV: {', '.join(BITS)}. [default: the model's, or bfloat16]",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Length of a session; may be given several times.  [default: 4096, 32768, 102400]",
            show_default=False,
        ),
    ] = None,
    on: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="MNT|DEV",
            autocompletion=complete_mountpoint,
            help="A mount, or a device or image, as the cold tier; its speed is measured.",
            show_default=False,
        ),
    ] = None,
    hot: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Hot memory.  [default: the GPUs' without the model's weights]",
            show_default=False,
        ),
    ] = None,
    warm: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="As kvfs mount --warm.  [default: as a mount would choose]",
            show_default=False,
        ),
    ] = None,
    ring: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Size of a device or image that is to be bought.",
            show_default=False,
        ),
    ] = None,
    bandwidth: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="What the device reads a second, such as 3G. [default: measured, with --on]",
            show_default=False,
        ),
    ] = None,
    prefill_rate: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS",
            min=0.001,
            help="Tokens a second that the engine computes from a prompt.",
            show_default=False,
        ),
    ] = None,
    tokens_a_day: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS",
            min=0,
            help="New tokens of all sessions a day.  [default: the trace's]",
            show_default=False,
        ),
    ] = None,
    ratio: Annotated[
        float,
        typer.Option(
            metavar="X", min=0.1, help="Bytes of KV for a byte of the ring: 1.45 on bfloat16."
        ),
    ] = 1.0,
    write_amplification: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="X",
            help="Bytes on the device for one of KV that is stored.  [default: "
            f"the mount's, or {_WRITE_AMPLIFICATION}]",
            show_default=False,
        ),
    ] = None,
    tbw: Annotated[
        float | None,
        typer.Option(
            metavar="TB",
            min=0.001,
            help="What the SSD's maker lets one write, from its data sheet.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="FILE",
            help="A recorded workload, as for kvfs replay.",
            show_default=False,
        ),
    ] = None,
    window_hours: Annotated[
        float,
        typer.Option(
            metavar="HOURS", help="Sessions of a CSV trace start at random within so many hours."
        ),
    ] = 24.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what a model's KV takes, how many sessions fit where on this machine, how fast they
    come back, and how long a ring and its SSD last.

    \b
    Examples:
      kvfs plan Llama-3.1-8B/config.json
      kvfs plan Llama-3.1-8B --on /mnt/kv --prefill-rate 8000
      kvfs plan --layers 32 --kv-heads 8 --head-dim 128 --dtype bfloat16 --tokens 100000
      kvfs plan model/ --ring 4T --bandwidth 6G --tokens-a-day 2e9 --tbw 7000
      kvfs plan model/ --ring 1T --bandwidth 3G --prefill-rate 8000 --trace turns.csv --json
    """
    if ring is not None and on is not None:
        raise typer.BadParameter("--ring is a device to be bought, --on one that is there")
    if not 0 < window_hours < float("inf"):
        raise typer.BadParameter("--window-hours must be more than 0")
    model = _model(model_path, layers, kv_heads, head_dim, dtype)
    recorded = None if trace is None else read_trace(trace, window_hours)
    place = machine.place_of(on) if on is not None else Place(_ring(ring))
    found = {
        "hot": machine.hot_memory(System(), hot, machine.weights_of(model_path)),
        "warm": machine.warm_memory(warm, place),
        "cold": place.cold,
    }
    speeds = {
        "warm": machine.warm_speed(),
        "cold": machine.cold_speed(bandwidth, place.source),
    }
    tiers = Tiers(
        hot=found["hot"].size, warm=found["warm"].size, cold=found["cold"].size,
        warm_speed=speeds["warm"].value, cold_speed=speeds["cold"].value, ratio=ratio,
    )  # fmt: skip
    sessions = [plan_session(model, n, tiers, prefill_rate) for n in sorted(set(tokens or _TOKENS))]
    workload = None if recorded is None else _replayed(recorded, model, tiers, prefill_rate)
    load = tokens_a_day
    if load is None and workload is not None:
        load = workload.tokens_a_day
    amplification = _amplification(write_amplification, place)
    endurance = None
    if load is not None:
        rated = None if tbw is None else tbw * _TERA
        endurance = endure(model, tiers, load, amplification.value or 1.0, rated)
    if json_output:
        print_json(
            _document(model, found, speeds, sessions, workload, load, amplification, endurance)
        )
        return
    _print_model(model)
    _print_tiers(found, speeds)
    _print_sessions(sessions)
    if workload is not None:
        _print_workload(workload)
    if endurance is not None and load is not None:
        _print_endurance(endurance, load, amplification)


# -- what is planned


def _model(
    path: Path | None,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    dtype: str | None,
) -> Model:
    numbers = (layers, kv_heads, head_dim)
    if path is not None:
        if any(number is not None for number in numbers):
            raise typer.BadParameter("give either MODEL or --layers --kv-heads --head-dim")
        return read_model(path, dtype)
    if layers is None or kv_heads is None or head_dim is None:
        raise typer.BadParameter(
            "name a MODEL (its config.json or folder), or all of --layers --kv-heads --head-dim"
        )
    try:
        return plain_model(layers, kv_heads, head_dim, dtype_named(dtype or "bfloat16"))
    except ConfigError as fault:
        raise typer.BadParameter(str(fault)) from None


def _ring(size: int | None) -> Found:
    if size is None:
        return Found(None, "no device named: give MNT or DEV by --on, or --ring SIZE")
    return machine.ring_of(size)


def _amplification(wanted: float | None, place: Place) -> Found:
    if wanted is not None:
        return Found(wanted, "as given")
    if place.write_amplification is not None:
        return place.write_amplification
    return Found(_WRITE_AMPLIFICATION, "random sessions in a ring that is 85 % full")


def _replayed(trace: Trace, model: Model, tiers: Tiers, tokens_a_second: float | None) -> Workload:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replaying", total=3 * len(trace.requests))
        advance: Callable[[], None] = lambda: progress.advance(task)  # noqa: E731
        return measure(trace, model, tiers, tokens_a_second, advance)


# -- what is told


def _document(
    model: Model,
    found: dict[str, Found],
    speeds: dict[str, Found],
    sessions: Sequence[SessionPlan],
    workload: Workload | None,
    load: float | None,
    amplification: Found,
    endurance: Endurance | None,
) -> dict[str, object]:
    return {
        "model": {
            "name": model.name,
            "attention": model.attention,
            "dtype": model.dtype,
            "layers": len(model.layers),
            "layers_with_window": model.windows,
            "layers_without_kv": model.others,
            "bytes_a_token": model.bytes_a_token,
            "notes": list(model.notes),
        },
        "tiers": {
            name: {"bytes": each.value, "source": each.source} for name, each in found.items()
        },
        "bytes_a_second": {
            name: {"value": each.value, "source": each.source} for name, each in speeds.items()
        },
        "sessions": [{**asdict(each), "gain": each.gain} for each in sessions],
        "workload": None
        if workload is None
        else {**asdict(workload), "reused_share": workload.reused_share},
        "load": None
        if endurance is None
        else {
            "tokens_a_day": load,
            "write_amplification": amplification.value,
            **asdict(endurance),
        },
    }


def _print_model(model: Model) -> None:
    kinds = f"{len(model.layers)} layers with KV"
    if model.windows:
        kinds += f", {model.windows} of them with a sliding window"
    if model.others:
        kinds += f", {model.others} without KV of their own"
    print_facts(
        [
            ("model", f"{model.name}: {model.attention}, {kinds}, {model.dtype}"),
            ("a token", f"{format_size(model.bytes_a_token)} ({model.bytes_a_token:g} bytes)"),
            *(("note", note) for note in model.notes),
        ]
    )


def _print_tiers(found: dict[str, Found], speeds: dict[str, Found]) -> None:
    typer.echo()
    rows = []
    for name, room in found.items():
        speed = speeds.get(name)
        known = room.source if speed is None else f"{room.source}; {speed.source}"
        rows.append([name, _size(room.value), _speed(speed), known])
    print_table(_TIER_COLUMNS, rows, ("room for KV", "read at"))


def _print_sessions(sessions: Sequence[SessionPlan]) -> None:
    typer.echo()
    rows = [
        [
            str(each.tokens),
            format_size(each.stored_bytes),
            format_size(each.needed_bytes),
            _count(each.fit_hot),
            _count(each.fit_warm),
            _count(each.fit_cold),
            _seconds(each.resume_warm_s),
            _seconds(each.resume_cold_s),
            _seconds(each.recompute_s),
            "-" if each.gain is None else f"{each.gain:.1f} x",
        ]
        for each in sessions
    ]
    print_table(_SESSION_COLUMNS, rows, _SESSION_COLUMNS)


def _print_workload(workload: Workload) -> None:
    typer.echo()
    print_facts(_workload_facts(workload))


def _workload_facts(workload: Workload) -> Iterator[tuple[str, str]]:
    yield "trace", f"{workload.requests} requests in {workload.hours:.1f} hours"
    yield (
        "prompts",
        f"p50 {workload.prompt_p50}, p90 {workload.prompt_p90}, p99 {workload.prompt_p99} tokens",
    )
    yield (
        "asked for",
        f"{workload.asked_tokens} tokens, {workload.reused_share:.1%} of them not for the first "
        f"time",
    )
    yield "new", f"{workload.tokens_a_day:.3g} tokens a day"
    for name, share in (
        ("found hot", workload.hot_share),
        ("found warm", workload.warm_share),
        ("found cold", workload.cold_share),
        ("computed anew", workload.computed_share),
    ):
        yield name, "-" if share is None else f"{share:.1%} of the tokens asked for"
    if workload.saved_s is not None:
        yield "saved", f"{workload.saved_s / 3600:.1f} hours of prefill, reading taken off"


def _print_endurance(endurance: Endurance, load: float, amplification: Found) -> None:
    typer.echo()
    print_facts(_endurance_facts(endurance, load, amplification))


def _endurance_facts(
    endurance: Endurance, load: float, amplification: Found
) -> Iterator[tuple[str, str]]:
    yield "load", f"{load:.3g} new tokens a day: {format_size(endurance.kv_bytes_a_day)} of KV"
    yield "until 70 % are in use", _days(endurance.days_until_expiry)
    yield "until reclaim", f"{_days(endurance.days_until_reclaim)}, if nothing is removed"
    yield (
        "written a year",
        f"{endurance.device_bytes_a_year / _TERA:.1f} TB, of it {amplification.value:.2f} bytes "
        f"for one stored ({amplification.source})",
    )
    yield (
        "the SSD lasts",
        "- (give its rating by --tbw)"
        if endurance.years is None
        else f"{endurance.years:.1f} years",
    )


def _size(value: float | None) -> str:
    return "-" if value is None else format_size(value)


def _speed(speed: Found | None) -> str:
    return "-" if speed is None or speed.value is None else f"{format_size(speed.value)}/s"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _days(value: float | None) -> str:
    if value is None:
        return "- (name a ring by --on or --ring)"
    return f"{value:.1f} days" if value >= 2 else f"{24 * value:.1f} hours"
