"""Machines page: state, work and last heartbeat of each machine that has not left the account. An
order (pause, resume, finish) reaches a machine with its next heartbeat.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar, Literal

from textual.app import ComposeResult
from typing_extensions import override

from shared.protocol import endpoints
from shared.protocol.accounts import Me, WorkerInfo
from shared.text import printable
from volunteer.control import commands
from volunteer.i18n.catalogue import N_, _, ngettext
from volunteer.i18n.formats import credit
from volunteer.tui import keys
from volunteer.tui.query_page import RELOAD, PageQuery, QueryPage, QueryReply
from volunteer.tui.text import ago, rate
from volunteer.tui.widgets.panel import Scene
from volunteer.tui.widgets.table import Column, Filling, Listing, Row

COLUMNS = (
    Column(title=N_("machine"), least=20),
    Column(title=N_("state"), cells=12),
    Column(title=N_("device"), cells=9, least=112),
    Column(title=N_("run"), cells=12, least=70),
    Column(title=N_("task"), cells=9, align="right", least=126),
    Column(title=N_("steps per s"), cells=11, align="right", least=104),
    Column(title=N_("heat"), cells=6, align="right", least=56),
    Column(title=N_("credits a day"), cells=13, align="right", least=90),
    Column(title=N_("last seen"), cells=14, align="right"),
)
STATES = {
    "training": N_("training"),
    "online": N_("online"),
    "paused": N_("paused"),
    "offline": N_("offline"),
    "left": N_("left"),
}
ROLES = {"training": "good", "online": "text", "paused": "warn"}


class MachinesPage(QueryPage):
    """Machines page, opened over the device page; its keys send orders to other machines."""

    NAME = "device"
    AUTO_FOCUS = "#machines"
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            key="escape",
            action="back",
            short=N_("back"),
            help=N_("Back to the page before."),
            rank=1,
        ),
        RELOAD,
        keys.KeyCommand(
            key="p",
            action="order('pause')",
            short=N_("pause it"),
            help=N_("Pause the machine under the cursor; it obeys within half a minute."),
            rank=2,
        ),
        keys.KeyCommand(
            key="o",
            action="order('resume')",
            short=N_("resume it"),
            help=N_("Resume the machine under the cursor."),
            rank=3,
        ),
        keys.KeyCommand(
            key="e",
            action="order('finish')",
            short=N_("finish it"),
            help=N_("Let the machine under the cursor complete its task and take no more."),
            rank=4,
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._orders: dict[str, str] = {}  # the last order to each machine, by worker id

    def action_back(self) -> None:
        """Return to the previous page."""
        self.dismiss()

    @override
    def body(self) -> ComposeResult:
        yield Listing(COLUMNS, self._filling, id="machines")

    @override
    def queries(self) -> dict[str, PageQuery]:
        return {"me": lambda control: control.query(endpoints.ME)}

    def _machines(self) -> tuple[WorkerInfo, ...]:
        me: Me | None = self.reply("me").value
        return tuple(worker for worker in me.workers if worker.state != "left") if me else ()

    def _filling(self, scene: Scene) -> Filling:
        reply: QueryReply[Me] = self.reply("me")
        workers = self._machines()  # in the order in which they joined
        names = Counter(worker.hostname for worker in workers)
        working = sum(worker.state == "training" for worker in workers)
        waiting = reply.pending and reply.value is None
        return Filling(
            rows=tuple(
                machine_row(
                    worker,
                    scene,
                    old=reply.old(scene),
                    alike=names[worker.hostname] > 1,
                    order=self._orders.get(worker.worker_id, ""),
                )
                for worker in workers
            ),
            empty=reply.error or (_("asking the coordinator") if waiting else ""),
            title=ngettext("{n} machine", "{n} machines", len(workers)),
            subtitle=reply.note(scene) or _("{n} training", n=working),
        )

    def action_order(self, order: Literal["pause", "resume", "finish"]) -> None:
        """Send an order to the machine under the cursor."""
        worker_id, control = self.query_one(Listing).key, self.volunteer.control
        machine = next(
            (machine for machine in self._machines() if machine.worker_id == worker_id), None
        )
        if machine is None or control is None:
            return
        sentence = _(
            "{machine} hears of it with its next heartbeat", machine=printable(machine.hostname, 40)
        )

        def done() -> None:
            self._orders[machine.worker_id] = order
            self.volunteer.tell(sentence)
            self.query_again()

        self.volunteer.command(
            control.do(commands.OrderMachine(worker_id=machine.worker_id, order=order)), done
        )


# State that a machine has once it obeys an order, and the words until then.
ORDERS = {
    "pause": (("paused",), N_("pause sent")),
    "resume": (("online", "training"), N_("resume sent")),
    "finish": (("online", "paused"), N_("finish sent")),
}


def machine_row(
    machine: WorkerInfo, scene: Scene, *, old: bool, alike: bool = False, order: str = ""
) -> Row:
    """Return a machine as a row of the table, with its id if another machine has the same name
    (`alike`). An `order` is shown in place of the state until the machine obeys.
    """
    state, role = _(STATES[machine.state]), ROLES.get(machine.state, "dim")
    if order and machine.state not in (*ORDERS[order][0], "offline"):
        state, role = _(ORDERS[order][1]), "info"
    name = printable(machine.hostname, 80)
    if alike:
        name = f"{name} {machine.worker_id[:4]}"
    here = machine.worker_id == scene.view.status.worker_id
    live = machine.state != "offline"
    heat = f"{machine.celsius:.0f} °C" if machine.celsius is not None and live else "-"
    seen_s = max(0.0, scene.now - machine.last_seen)
    return Row(
        key=machine.worker_id,
        cells=(
            ((_("{machine}, this one", machine=name) if here else name, "value"),),
            ((state, role),),
            ((printable(machine.device, 20) or "-", "text"),),
            ((printable(machine.run, 40) or "-", "text"),),
            ((str(machine.task) if machine.task is not None else "-", "text"),),
            ((rate(machine.rate) if machine.rate and live else "-", "text"),),
            ((heat, "text"),),
            ((credit(machine.day_micro) if machine.day_micro is not None else "-", "text"),),
            ((_("now") if seen_s < 2 else _("{time} ago", time=ago(seen_s)), "dim"),),
        ),
        dim=old,
    )
