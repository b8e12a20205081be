"""The live view (textual). A thread of its own looks at the mount, another changes it: what hangs
there holds up neither keys nor the end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, VerticalScroll
from textual.coordinate import Coordinate
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from mount_tools.common import CommandError, describe_os_error, printable
from mount_tools.selection import Order
from mount_tools.top import panels
from mount_tools.top.history import History
from mount_tools.top.source import Row, Seen, Source, Trouble, set_xattr
from mount_tools.top.table import COLUMNS, View, cells

_BUDGET_SHARE = 0.25
_PAUSE_LOOKS = 3  # at least so long after a look as it took, times this
_ROWS_MAX = 500
_ACTIONS_MAX = 16
_BORDER = 2
_TALL = 24

_HELP = """\
[b]↑ ↓ PgUp PgDn[/b]  choose a session

[b]p[/b]  pin it, so that it is never reclaimed, or let it go ([yellow]●[/] is pinned)
[b]d[/b]  demote it: see it in the ring and give its memory back
[b]f[/b]  prefetch it: bring it into warm memory
[b]s[/b]  sort by the next column, [b]r[/b] the other way round; or click a head
[b]/[/b]  filter by words: parts of a name or model, patterns as in team/*,
   warm, cold, mixed, pinned; Enter keeps it, Esc takes it away
[b]q[/b]  quit

[b]tiers[/b]  leased: what agents have mapped
       live: shared bytes once, with metadata
[b]rates[/b]  read: through the mount, not what agents map
       written: of files, after compression
       to device: with all that belongs to it
[b]ring[/b]   each character some segments, the higher the more is live
       [black on green]▶[/] the log goes on here, then [green]▹[/]
       [black on yellow]◀[/] a mount would replay from here
       · free, _ dead, which two checkpoints make free
"""


class _Looked(Message):
    """What a look at the mount has found."""

    def __init__(self, found: Seen | Trouble) -> None:
        super().__init__()
        self.found = found


class _Acted(Message):
    """How an action ended, in one line."""

    def __init__(self, text: str, *, failed: bool) -> None:
        super().__init__()
        self.text = text
        self.failed = failed


def _panel(name: str) -> Static:
    panel = Static(id=name, classes="panel")
    panel.border_title = name
    return panel


class HelpScreen(ModalScreen[None]):
    """Any key leaves it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,question_mark,q,enter", "dismiss", "Back")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            yield Static(_HELP)


class TopApp(App[None]):
    """`interval` in seconds, between two looks."""

    TITLE = "kvfs top"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-slim"), (72, "-narrow"), (108, "-wide"),
    ]  # fmt: skip
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-flat"), (16, "-short"), (_TALL, "-tall"),
    ]  # fmt: skip
    CSS = """
    #head, #message { height: 1; padding: 0 1; }
    #head { background: $panel; }
    #panels { height: 9; grid-size: 3 1; grid-columns: 13fr 14fr 11fr; }
    #ring { height: auto; }
    .panel { border: round $primary; border-title-color: $accent; padding: 0 1; height: 9; }
    #sessions { height: 1fr; border: round $primary; border-title-color: $accent;
                scrollbar-size-horizontal: 0; }
    #sessions > .datatable--header { background: $panel; text-style: bold; }
    #filter { height: 1; border: none; padding: 0 1; display: none; }
    #filter.shown { display: block; }
    .-narrow #latency, .-slim #latency, .-slim #rates { display: none; }
    .-narrow #panels { grid-size: 2 1; grid-columns: 1fr 1fr; }
    .-slim #panels { grid-size: 1 1; grid-columns: 1fr; }
    .-short #panels, .-flat #panels, .-flat #ring { display: none; }
    .stale { opacity: 50%; }
    HelpScreen { align: center middle; }
    #help { width: 78; max-width: 100%; height: auto; max-height: 100%;
            border: round $accent; background: $surface; padding: 1 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("p", "pin", "Pin"),
        ("d", "demote", "Demote"),
        ("f", "prefetch", "Prefetch"),
        ("s", "sort", "Sort"),
        ("r", "reverse", "Reverse"),
        ("slash", "filter", "Filter"),
        ("question_mark", "help", "Help"),
        ("q", "quit", "Quit"),
        Binding("escape", "no_filter", show=False),
    ]

    def __init__(self, source: Source, view: View, interval: float) -> None:
        super().__init__()
        self._source = source
        self._view = view
        self._interval = interval
        self._history = History()
        self._shown: list[Row] = []
        self._drawn: list[list[Text]] = []
        self._heads: list[Text] = []
        self._ended = threading.Event()
        self._actions: queue.Queue[Callable[[], str]] = queue.Queue(_ACTIONS_MAX)
        self._is_in_trouble = False
        self._head = Static(id="head")
        self._panels = [
            (_panel("tiers"), panels.tiers),
            (_panel("rates"), panels.rates),
            (_panel("latency"), panels.latencies),
        ]
        self._ring = _panel("ring")
        self._table: DataTable[Text] = DataTable(id="sessions", cursor_type="row")
        self._filter = Input(
            id="filter", placeholder="filter: words of name or model, team/*, cold, pinned"
        )
        self._message = Static(id="message")

    def compose(self) -> ComposeResult:
        yield self._head
        with Grid(id="panels"):
            for panel, _ in self._panels:
                yield panel
        yield self._ring
        yield self._table
        yield self._filter
        yield self._message
        yield Footer()

    def on_mount(self) -> None:
        self._table.border_title = "sessions"
        self._table.focus()
        for work in (self._look, self._act):
            threading.Thread(target=work, daemon=True).start()

    def on_unmount(self) -> None:
        self._ended.set()

    # -- in threads of their own

    def _look(self) -> None:
        budget = self._interval * _BUDGET_SHARE
        while not self._ended.is_set():
            started = time.monotonic()
            found = self._source.look(budget)
            self.post_message(_Looked(found))
            took = time.monotonic() - started
            # The more sessions there are, the more work it is for the daemon too.
            pause = took * _PAUSE_LOOKS if isinstance(found, Seen) else 0.0
            self._ended.wait(max(self._interval, pause))

    def _act(self) -> None:
        while True:
            action = self._actions.get()
            try:
                self.post_message(_Acted(action(), failed=False))
            except CommandError as failure:
                self.post_message(_Acted(str(failure), failed=True))

    # -- what is shown

    @on(_Looked)
    def _looked(self, message: _Looked) -> None:
        found = message.found
        for panel in (self._ring, *(panel for panel, _ in self._panels)):
            panel.set_class(isinstance(found, Trouble), "stale")
        if isinstance(found, Trouble):
            self._say(found.message, "bold red")
        elif self._history.add(found):
            self._say(f"it was mounted again, by process {found.stats['pid']}", "bold green")
        elif self._is_in_trouble:
            self._say("it answers again", "bold green")
        self._is_in_trouble = isinstance(found, Trouble)
        self._draw()

    def on_resize(self) -> None:
        # Once the parts have their new sizes.
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        seen = self._history.newest
        if seen is None or not self._table.is_mounted:
            return
        with self.batch_update():
            self._head.update(panels.headline(seen))
            for panel, lines in self._panels:
                if panel.content_size.width:
                    text = panels.joined(lines(seen, self._history, panel.content_size.width))
                    panel.update(text)
            self._draw_ring(seen)
            self._draw_sessions(seen)

    def _draw_ring(self, seen: Seen) -> None:
        width = self._ring.content_size.width
        if width:
            lines = panels.ring(seen.segments, width, 1 if self.size.height < _TALL else 3)
            self._ring.styles.height = len(lines) + _BORDER
            self._ring.update(panels.joined(lines))

    def _draw_sessions(self, seen: Seen) -> None:
        rows = self._view.rows(seen.rows)
        more = f", {_ROWS_MAX} shown" if len(rows) > _ROWS_MAX else ""
        words = f" with {printable(' '.join(self._view.words))}" if self._view.words else ""
        self._table.border_title = Text(f"{len(rows)} of {len(seen.rows)} sessions{words}{more}")
        chosen, names = self._chosen, [row.name for row in self._shown]
        self._shown = rows[:_ROWS_MAX]
        hottest = max((row.heat for row in seen.rows), default=0.0)
        drawn = [cells(row, hottest) for row in self._shown]
        heads = [self._heading(column.title, column.order) for column in COLUMNS]
        if heads == self._heads and names == [row.name for row in self._shown]:
            self._redraw_cells(drawn)
        else:
            self._redraw_all(heads, drawn, chosen)
        self._heads, self._drawn = heads, drawn

    def _redraw_cells(self, drawn: list[list[Text]]) -> None:
        """What changed of rows that are where they were."""
        for at, (before, after) in enumerate(zip(self._drawn, drawn, strict=True)):
            for column, (old, new) in enumerate(zip(before, after, strict=True)):
                if old != new:
                    self._table.update_cell_at(Coordinate(at, column), new, update_width=True)

    def _redraw_all(self, heads: list[Text], drawn: list[list[Text]], chosen: Row | None) -> None:
        """The chosen session stays the chosen one, wherever it moves."""
        table = self._table
        left, top = table.scroll_offset
        table.clear(columns=True)
        table.add_columns(*heads)
        for texts in drawn:
            table.add_row(*texts)
        names = [row.name for row in self._shown]
        if chosen is not None and chosen.name in names:
            table.move_cursor(row=names.index(chosen.name), scroll=False)
        table.scroll_to(left, top, animate=False)

    def _heading(self, title: str, order: Order | None) -> Text:
        if order is not self._view.order:
            return Text(title)
        return Text(f"{title} {'▲' if self._view.reverse else '▼'}", "bold green")

    @property
    def _chosen(self) -> Row | None:
        at = self._table.cursor_row
        return self._shown[at] if 0 <= at < len(self._shown) else None

    def _say(self, text: str, style: str) -> None:
        self._message.update(Text(printable(text), style))

    # -- keys

    def action_pin(self) -> None:
        chosen = self._chosen
        if chosen is not None:
            value, done = (b"0", "may be reclaimed again") if chosen.pinned else (b"1", "is pinned")
            self._change(chosen.name, "pin", value, done)

    def action_demote(self) -> None:
        if self._chosen is not None:
            self._change(self._chosen.name, "demote", b"1", "is in the ring alone")

    def action_prefetch(self) -> None:
        if self._chosen is not None:
            self._change(self._chosen.name, "prefetch", b"1", "is being brought in")

    def _change(self, session: str, name: str, value: bytes, done: str) -> None:
        def action() -> str:
            try:
                set_xattr(self._source.mountpoint, session, name, value)
            except OSError as failure:
                raise CommandError(f"{session}: {describe_os_error(failure)}") from None
            return f"{session} {done}"

        try:
            self._actions.put_nowait(action)
        except queue.Full:
            self._say("the mount is still busy with what was asked before", "yellow")
        else:
            self._say(f"{session}: {name} ...", "yellow")

    @on(_Acted)
    def _acted(self, message: _Acted) -> None:
        self._say(message.text, "red" if message.failed else "green")

    def action_sort(self) -> None:
        orders = [column.order for column in COLUMNS if column.order is not None]
        self._view.order = orders[(orders.index(self._view.order) + 1) % len(orders)]
        self._draw()

    def action_reverse(self) -> None:
        self._view.reverse = not self._view.reverse
        self._draw()

    @on(DataTable.HeaderSelected)
    def _heading_clicked(self, message: DataTable.HeaderSelected) -> None:
        order = COLUMNS[message.column_index].order
        if order is self._view.order:
            self.action_reverse()
        elif order is not None:
            self._view.order = order
            self._draw()

    def action_filter(self) -> None:
        self._filter.add_class("shown")
        self._filter.focus()

    @on(Input.Changed)
    def _filter_changed(self, message: Input.Changed) -> None:
        self._view.words = tuple(message.value.lower().split())
        self._draw()

    @on(Input.Submitted)
    def _filter_kept(self) -> None:
        self._filter.set_class(bool(self._view.words), "shown")
        self._table.focus()

    def action_no_filter(self) -> None:
        self._filter.value = ""
        self._filter.remove_class("shown")
        self._table.focus()

    def action_help(self) -> None:
        self.push_screen(HelpScreen())
