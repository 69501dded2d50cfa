"""loaderd put together: sockets, state, and what happens when inferds come and go."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import structlog
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from loaderd.authorisation import Policy
from loaderd.chronicle import Chronicle
from loaderd.config import LoaderdConfig
from loaderd.control_server import ControlServer
from loaderd.copies import Copies
from loaderd.deployment import Deployment
from loaderd.event_socket import EventSocket
from loaderd.gpu_watch import GpuWatch
from loaderd.handoff_server import HandoffServer
from loaderd.host import Host
from loaderd.inquiries import Inquiries
from loaderd.journal import Journal
from loaderd.leases import Lease
from loaderd.metrics import LoaderdMetrics
from loaderd.model_devices import ModelDevices
from loaderd.nvml import open_nvml
from loaderd.operations import Operations
from loaderd.pace import Pace
from loaderd.peer_groups import configured_group
from loaderd.placement import PlacementRules
from loaderd.plan import Verdict as PlanVerdict
from loaderd.planning import Planner, plan_report
from loaderd.reconciliation import Reconciliation
from loaderd.scrub import Scrub
from loaderd.slab_closer import SlabCloser
from loaderd.slab_table import SlabTable
from loaderd.versions import VersionTable
from shared.codec import CONTROL_FRAME_BYTES
from shared.control import (
    Diff,
    History,
    Operation,
    Push,
    PushReply,
    Rollback,
    RollbackReply,
    Status,
    Verify,
    Versions,
)
from shared.errors import ChangeoverError, CheckpointError, InvalidRequest, ResourceError
from shared.health import HealthServer, LoopPulse
from shared.heap import freeze_heap
from shared.ids import DeviceId, Generation, LeaseId, VersionRef
from shared.memory.selection import open_backend, reserve_pool
from shared.metrics import loop_lag_histogram, new_registry
from shared.notify import Notifier
from shared.resident import name_tensors
from shared.run_dir import RunDir, listen_seqpacket, remove_left_over
from shared.supervisor import Stop, Supervisor
from shared.verdict import Verdict

log = structlog.get_logger(__name__)

SOCKET_MODE = 0o666
"""Whoever enters the run directory may ask; what they may change is decided by their credentials."""

QUEUED_REPLIES = 8
"""Replies that wait for a client that does not read, before its further ones are dropped, and requests
that are taken from one ahead of their turn.  Each may have CONTROL_FRAME_BYTES."""

MAINTAIN_EVERY_S = 2.0

SILENT_LOOKS = 30
"""Rounds of maintenance without a word, from an inferd that reports each second, until its lease ends:
one that hangs would hold up each rollout of its model for as long as preparing may take."""

RETRY_AFTER_S = (2.0, 10.0, 60.0, 300.0)


class Loaderd:
    """The daemon's state and its reactions; also who is told about leases."""

    def __init__(self, config: LoaderdConfig, chronicle: Chronicle, supervisor: Supervisor) -> None:
        self._config = config
        self._chronicle = chronicle
        self._supervisor = supervisor
        self._backend = open_backend(config.backend, config.memory_limit_bytes, legacy_ipc=config.legacy_ipc)
        devices = ModelDevices.choose(config, self._backend)
        if config.pool_bytes is not None:
            for device in devices.all:
                self._reserve(device, config.pool_bytes)
        nvml = open_nvml() if config.backend == "cuda" else None
        self.gpus = GpuWatch(nvml, devices.all, chronicle)
        self.closer = SlabCloser(self._not_freed)
        self.slabs = SlabTable(self.closer.add)
        versions = VersionTable(chronicle, self.slabs)
        planner = Planner(
            config.model_roots,
            self._backend,
            versions,
            PlacementRules(slab_bytes=config.slab_bytes or self._backend.slab_bytes),
            config.memory_limit_bytes,
            self.gpus,
        )
        self.handoff = HandoffServer(
            chronicle.generation, self.policy(), self._backend, devices, chronicle, holder=self
        )
        self.pace = Pace(config.throttle_limits(), self.handoff.leases, chronicle, self._spawn)
        self._host = Host(
            chronicle,
            Operations(chronicle),
            versions,
            Copies(versions, self._backend, self.gpus, chronicle, self.pace, self.closer),
            planner,
            self._backend,
            devices,
            self.gpus,
            self.handoff.leases,
            self.pace,
            self.closer,
            self._spawn,
        )
        self.deployments: dict[str, Deployment] = {}
        self._reconciliations: dict[str, Reconciliation] = {}
        self.scrub = Scrub(self._host, self.deployments)
        self.inquiries = Inquiries(self._host, self.deployments, config.model_roots, self.scrub)
        self._attempts: dict[LeaseId, tuple[int, float]] = {}  # failures, and when to try again

    def _reserve(self, device: DeviceId, pool_bytes: int) -> None:
        missing = reserve_pool(self._backend, device, pool_bytes)
        if missing > 0:
            # No reason to end: what is missing may be what inferds still hold of loaderd's last life.
            self._chronicle.record(
                "pool.short",
                f"{missing} of the pool's {pool_bytes} bytes are held by others until they are free",
                device=device,
                pool_bytes=pool_bytes,
                missing_bytes=missing,
            )

    def _not_freed(self, error: ChangeoverError) -> None:
        text = f"memory that nobody uses could not be given back: {error.message}"
        self._chronicle.record("memory.not_freed", text)

    def policy(self) -> Policy:
        """Who may do what; raises ConfigError for a group that does not exist."""
        return Policy(
            os.getuid(),
            configured_group("admin_group", self._config.admin_group),
            configured_group("inferd_group", self._config.inferd_group),
        )

    # --- verbs that change something -------------------------------------------------------------

    async def push(self, body: Push) -> PushReply:
        """Plan; unless it is a dry run or refused, start."""
        ref = VersionRef.of(body.name, body.model)
        devices = self._host.devices.of(ref.model)
        try:
            opened = await self._host.planner.open(body.name, ref, self._config.model(ref.model))
        except CheckpointError as error:
            if not body.dry_run:
                self._chronicle.record("push.refused", error.message, model=ref.model, version=ref.version)
            raise
        try:
            await self.closer.settle()
            # Only what starts makes a model known: a name that was mistyped leaves no trace.
            known = self.deployments.get(ref.model)
            active, retained = (known.active, known.retained) if known is not None else (None, None)
            plan = self._host.planner.plan(opened, devices, active, retained)
            report = plan_report(plan, opened)
            if not any(lease.model == ref.model for lease in self.handoff.leases.values()):
                warning = f"no inferd of {ref.model} is attached: the version will wait for one"
                report = report.model_copy(update={"warnings": (*report.warnings, warning)})
            if body.dry_run or plan.verdict is not PlanVerdict.HOT:
                if not body.dry_run:
                    self._chronicle.record(
                        "push.refused", "; ".join(plan.reasons), model=ref.model, version=ref.version
                    )
                opened.close()
                return PushReply(operation=None, plan=report)
        except BaseException:
            opened.close()
            raise
        operation = self._deployment(ref.model).push(opened, body.in_flight)
        return PushReply(operation=operation.id, plan=report)

    async def rollback(self, body: Rollback) -> RollbackReply:
        """Start to commit a version that is still resident."""
        model = body.model
        if model is None and body.to is not None:
            model = next((d.model for d in self.deployments.values() if d.has(body.to)), None)
        operation = self._named_deployment(model).rollback(body.to, body.in_flight)
        return RollbackReply(operation=operation.id)

    def _named_deployment(self, model: str | None) -> Deployment:
        if model is not None:
            if model not in self.deployments:
                raise InvalidRequest(f"no version of {model} is known here", model=model)
            return self.deployments[model]
        with_versions = [d for d in self.deployments.values() if d.active is not None]
        if len(with_versions) != 1:
            names = ", ".join(sorted(d.model for d in with_versions))
            raise InvalidRequest(
                f"name the model: those with an active version are {names}"
                if names
                else "no model has an active version"
            )
        return with_versions[0]

    def _deployment(self, model: str) -> Deployment:
        if model not in self.deployments:
            deployment = Deployment(model, self._config.model(model), self._host)
            recollected = self._chronicle.journal.recollection.committed.get(model)
            self.deployments[model] = deployment
            self._reconciliations[model] = Reconciliation(deployment, self._host, recollected)
        return self.deployments[model]

    # --- leases ----------------------------------------------------------------------------------

    def attached(self, lease: Lease) -> None:
        """Adopt what the inferd holds if that is needed, and bring it up to date."""
        self._spawn(self.scrub.tell(lease))
        self._spawn(self._welcome(lease))

    def reported(self, lease: Lease) -> None:
        """Let the throttle know; a version's memory goes when its release is confirmed or its lease ends."""
        self.pace.reported(lease)

    def detached(self, lease: Lease) -> None:
        """Free what only this inferd still mapped."""
        self._attempts.pop(lease.id, None)
        self.pace.detached(lease)
        self._host.versions.collect(tuple(self.handoff.leases.values()))

    async def _welcome(self, lease: Lease) -> None:
        failures, _ = self._attempts.get(lease.id, (0, 0.0))
        # Until this attempt has ended there shall not be another.
        self._attempts[lease.id] = (failures, float("inf"))
        try:
            self._deployment(lease.model)
            await self._reconciliations[lease.model].welcome(lease)
        except ChangeoverError as error:
            wait_s = RETRY_AFTER_S[min(failures, len(RETRY_AFTER_S) - 1)]
            if lease.id in self.handoff.leases:
                self._attempts[lease.id] = (failures + 1, time.monotonic() + wait_s)
                self._chronicle.record(
                    "inferd.not_reconciled", error.message, model=lease.model, inferd=lease.name
                )
            else:
                self._attempts.pop(lease.id, None)
        else:
            self._attempts[lease.id] = (0, 0.0)

    async def maintain(self) -> None:
        """Bring inferds that are behind up to date, and have them let go of what nobody needs; again and
        again, with longer waits."""
        while True:
            await asyncio.sleep(MAINTAIN_EVERY_S)
            if self._config.pool_bytes is not None:
                for device in self._host.devices.all:
                    # Asking has the pool take back what readers have let go of.
                    self._backend.free_bytes(device)
            for lease in tuple(self.handoff.leases.values()):
                if lease.count_silence() >= SILENT_LOOKS:
                    self._end_silent(lease)
                    continue
                _, not_before = self._attempts.get(lease.id, (0, 0.0))
                reconciliation = self._reconciliations.get(lease.model)
                if reconciliation is None or time.monotonic() < not_before:
                    continue
                if reconciliation.is_due(lease):
                    self._spawn(self._welcome(lease))

    def _end_silent(self, lease: Lease) -> None:
        self._chronicle.record(
            "lease.silent",
            f"inferd {lease.name} has not reported for {SILENT_LOOKS * MAINTAIN_EVERY_S:g} s; its lease ends",
            model=lease.model,
            inferd=lease.name,
            lease=lease.id,
        )
        lease.close()

    def recover(self) -> None:
        """Begin to find out what serves; pushes wait until it is known."""
        for model, committed in self._chronicle.journal.recollection.committed.items():
            try:
                self._deployment(model)
            except InvalidRequest as error:  # the configuration has no device for it any more
                self._chronicle.record(
                    "restore.refused", error.message, model=model, version=committed.tag.ref.version
                )
                continue
            self._spawn(self._reconciliations[model].recover(self._config.adopt_grace_s))

    # --- health ----------------------------------------------------------------------------------

    def ready(self) -> Verdict:
        """Ready when a verified version can be handed out for every model that has one to hand out."""
        active = {d.model: str(d.active.tag) for d in self.deployments.values() if d.active is not None}
        if not active:
            failures = (d.failure for d in self.deployments.values() if d.failure)
            return Verdict(False, "; ".join(("no verified version is active", *failures)))
        for deployment in self.deployments.values():
            for role, version in (("active", deployment.active), ("retained", deployment.retained)):
                damaged = self._host.versions.damaged(version) if version is not None else ()
                if version is not None and damaged:
                    reason = f"{role} {version.tag} is damaged: {name_tensors(damaged)}"
                    return Verdict(False, reason, {**active, "damaged_tensors": len(damaged)})
        return Verdict(True, details=active)

    async def end_work(self) -> None:
        """Have no thread hash or copy any more, when nothing else is done."""
        self.pace.close()
        await self._host.checks.drain()

    def export_metrics(self, registry: CollectorRegistry) -> None:
        """Compute this daemon's metrics whenever the registry is scraped."""
        LoaderdMetrics(registry, self.slabs, self._host, self.deployments, self.scrub)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._supervisor.start(work, name=getattr(work, "__qualname__", "work"), may_end=True)


async def serve(config: LoaderdConfig, stop: Stop) -> None:
    """Run loaderd until `stop`."""
    run_dir = RunDir(config.run_dir)
    try:
        config.state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"state directory {config.state_dir}: {error.strerror}") from error
    registry = new_registry("loaderd")
    pulse = LoopPulse(observe_lag=loop_lag_histogram(registry).observe)
    with ExitStack() as stack:
        notifier = stack.enter_context(Notifier.from_environment())
        stack.enter_context(run_dir.only_daemon("loaderd"))
        journal = stack.enter_context(Journal(config.state_dir / "journal.jsonl"))
        context = stack.enter_context(zmq.Context())
        router = zmq.asyncio.Context.shadow(context.underlying).socket(zmq.ROUTER)
        router.setsockopt(zmq.SNDHWM, QUEUED_REPLIES)
        router.setsockopt(zmq.RCVHWM, QUEUED_REPLIES)
        stack.enter_context(_bound(router, run_dir.control))
        publisher = stack.enter_context(EventSocket(context, run_dir.events, SOCKET_MODE))
        chronicle = Chronicle(journal, Generation(str(uuid.uuid4())), publisher)
        listener = stack.enter_context(listen_seqpacket(run_dir.handoff, SOCKET_MODE))
        stack.callback(run_dir.handoff.unlink, missing_ok=True)
        async with AsyncExitStack() as serving:
            supervisor = Supervisor()
            loaderd = Loaderd(config, chronicle, supervisor)
            stack.callback(loaderd.closer.close)
            stack.callback(loaderd.slabs.close)
            stack.callback(loaderd.inquiries.close)
            loaderd.export_metrics(registry)
            serving.push_async_callback(loaderd.end_work)
            await serving.enter_async_context(supervisor)
            await serving.enter_async_context(
                HealthServer(run_dir.loaderd_health, pulse.verdict, loaderd.ready, registry)
            )
            control = ControlServer(
                router,
                loaderd.policy(),
                {
                    Push: loaderd.push,
                    Rollback: loaderd.rollback,
                    Status: loaderd.inquiries.status,
                    Versions: loaderd.inquiries.versions,
                    History: loaderd.inquiries.history,
                    Operation: loaderd.inquiries.operation,
                    Verify: loaderd.inquiries.verify,
                    Diff: loaderd.inquiries.diff,
                },
            )
            for root in config.model_roots:
                if not root.is_dir():
                    log.warning("model root is not there", root=str(root))
            freeze_heap(registry)  # before there are versions
            loaderd.recover()
            supervisor.start(pulse.run(), name="pulse")
            supervisor.start(loaderd.handoff.run(listener), name="handoff")
            supervisor.start(control.run(), name="control")
            supervisor.start(loaderd.maintain(), name="maintain")
            supervisor.start(loaderd.pace.run(), name="pace")
            if config.scrub_interval_s is not None:
                scrubbing = loaderd.scrub.run(config.scrub_interval_s, config.scrub_bytes_per_s)
                supervisor.start(scrubbing, name="scrub")
            if loaderd.gpus.has_nvml:
                supervisor.start(loaderd.gpus.run(), name="gpus")
            supervisor.start(notifier.feed_watchdog(lambda: pulse.verdict().is_ok), name="watchdog")
            chronicle.record("daemon.started", "loaderd is ready", pid=os.getpid())
            notifier.ready("ready")
            reason = await stop.wait()
            notifier.stopping(f"stopping: {reason}")
            chronicle.record("daemon.stopping", reason)


@contextmanager
def _bound(take_socket: zmq.Socket[Any], path: Path) -> Iterator[None]:
    """Bind a ZeroMQ socket for the time of the block; the file goes with it."""
    with closing(take_socket):
        take_socket.setsockopt(zmq.LINGER, 0)
        take_socket.setsockopt(zmq.MAXMSGSIZE, CONTROL_FRAME_BYTES)
        remove_left_over(path)  # libzmq would, and not say why it could not
        take_socket.bind(f"ipc://{path}")
        path.chmod(SOCKET_MODE)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
