"""What goes wrong: each fault is a function that breaks something, waits, and mends it."""
import json
import os
import random
import resource
import signal
import threading
import time

from network import sh


class Faults:
    """All faults. Each runs in a thread of its own, with dice of its own."""

    def __init__(self, fleet):
        self.fleet, self.dice = fleet, threading.local()

    @property
    def rng(self):
        return self.dice.rng

    def run(self, name, seed):
        self.dice.rng = random.Random(seed)
        try:
            getattr(self, name)()
        except Exception as error:  # A bug here must not end a run silently.
            self.fleet.violation("fault", name=name, error=repr(error))

    def any(self, *roles):
        return self.rng.choice([p for role in roles for p in self.fleet.of(role)])

    def hold(self, low, high):
        time.sleep(self.rng.uniform(low, high))

    def say(self, what, **more):
        self.fleet.note("fault", what=what, **more)
        print(f"{time.time() - self.fleet.began:7.1f} {what} {more}", flush=True)

    # Processes

    def kill(self):
        process = self.any("worker", "worker", "coordinator", "frontend", "etcd")
        self.say("kill", process=process.name)
        process.signal(signal.SIGKILL)

    def kill_leader(self):
        leader = self.fleet.leader()
        self.say("kill leader", process=leader)
        if leader:
            self.fleet.processes[leader].signal(signal.SIGKILL)

    def kill_child(self):
        process = self.fleet.processes.get("w2")
        for pid in (process.pids()[1:2] if process else []):
            self.say("kill child", process=process.name, pid=pid)
            os.kill(pid, signal.SIGKILL)

    def kill_all(self):
        role = self.rng.choice(["worker", "coordinator", "frontend", "etcd"])
        self.say("kill all", role=role)
        for process in self.fleet.of(role):
            process.signal(signal.SIGKILL)

    def freeze(self):
        process = self.any("worker", "worker", "coordinator", "frontend", "etcd")
        span = self.rng.choice([0.5, 1.5, 3, 6, 12, 30])
        self.say("freeze", process=process.name, seconds=span)
        pids = process.pids()
        self.each(pids, signal.SIGSTOP)
        time.sleep(span)
        self.each(pids, signal.SIGCONT)

    def freeze_leader(self):
        leader = self.fleet.leader()
        span = self.rng.choice([1, 4, 8, 15])
        self.say("freeze leader", process=leader, seconds=span)
        if leader:
            pids = self.fleet.processes[leader].pids()
            self.each(pids, signal.SIGSTOP)
            time.sleep(span)
            self.each(pids, signal.SIGCONT)

    def each(self, pids, number):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def end(self):
        process = self.any("worker", "coordinator", "frontend")
        self.say("end", process=process.name)
        process.signal(signal.SIGTERM)

    def roll(self):
        role = self.rng.choice(["worker", "coordinator", "frontend"])
        self.say("roll", role=role)
        for process in self.fleet.of(role):
            starts = process.starts
            process.signal(signal.SIGTERM)
            self.fleet.wait(lambda: process.starts > starts and process.pid, 20)
            self.hold(1, 4)

    def few_files(self):
        process = self.any("worker", "coordinator", "frontend")
        self.say("few files", process=process.name)
        process.limits = {resource.RLIMIT_NOFILE: 64}
        process.signal(signal.SIGKILL)
        self.hold(8, 15)
        process.limits = {}
        process.signal(signal.SIGKILL)

    def little_memory(self):
        process = self.any("worker", "frontend", "coordinator")
        self.say("little memory", process=process.name)
        process.limits = {resource.RLIMIT_AS: self.rng.choice([200, 400, 800, 1600]) << 20}
        process.signal(signal.SIGKILL)
        self.hold(6, 12)
        process.limits = {}
        process.signal(signal.SIGKILL)

    # Networks

    def partition(self):
        host = self.any("worker", "coordinator", "frontend", "etcd").host
        others = [name for name in self.fleet.network.addresses if name != host]
        etcds = [p.host for p in self.fleet.of("etcd") if p.host != host]
        peers = self.rng.choice([others, others + ["gateway"], etcds, [self.rng.choice(others)],
                                 [p.host for p in self.fleet.of("worker") if p.host != host],
                                 [p.host for p in self.fleet.of("coordinator") if p.host != host]])
        directions = self.rng.choice([("in", "out"), ("in", "out"), ("in",), ("out",)])
        span = self.rng.choice([1, 4, 8, 15, 25])
        self.say("partition", host=host, peers=peers, directions=directions, seconds=span)
        self.fleet.network.cut(host, peers, directions)
        time.sleep(span)
        self.fleet.network.heal(host)

    def lose(self):
        host = self.any("worker", "coordinator", "frontend", "etcd").host
        share = self.rng.choice([0.01, 0.05, 0.15, 0.3])
        self.say("lose", host=host, share=share)
        self.fleet.network.lose(host, share)
        self.hold(5, 15)
        self.fleet.network.heal(host)

    def delay(self):
        host = self.any("worker", "coordinator", "frontend", "etcd").host
        span = self.rng.choice([20, 80, 200])
        self.say("delay", host=host, milliseconds=span)
        if host in self.fleet.network.cables:
            return
        self.fleet.network.delay(host, span, span / 4)
        self.hold(5, 12)
        self.fleet.network.heal(host)

    def partition_and_kill(self):
        """A host that dies without a word: no FIN or RST comes of it, then it comes back."""
        process = self.any("worker", "coordinator", "frontend")
        self.say("partition and kill", process=process.name)
        others = [name for name in self.fleet.network.addresses if name != process.host]
        self.fleet.network.cut(process.host, others + ["gateway"])
        process.signal(signal.SIGKILL)
        self.hold(3, 20)
        self.fleet.network.heal(process.host)

    # Disks and memory

    def full_disk(self):
        process = self.any("worker", "coordinator", "frontend")
        disk = self.fleet.folder / process.host / "disk"
        self.say("full disk", process=process.name)
        self.fill(disk / "ballast", 80)
        if self.rng.random() < 0.5:
            process.signal(signal.SIGKILL)
        self.hold(4, 10)
        (disk / "ballast").unlink(missing_ok=True)

    def full_shm(self):
        process = self.fleet.processes["w2"]
        self.say("full shm", process=process.name)
        shm = self.fleet.folder / process.host / "shm"
        self.fill(shm / "ballast", 80)
        for pid in process.pids()[1:]:
            self.each([pid], signal.SIGKILL)
        self.hold(4, 15)
        (shm / "ballast").unlink(missing_ok=True)

    def fill(self, file, mebibytes):
        sh(f"dd if=/dev/zero of={file} bs=4k count={mebibytes * 256}", check=False)

    # etcd

    def etcd_call(self, path, body):
        for url in self.fleet.etcds:
            sh(f"curl -s -m 5 -X POST {url}/v3/{path} -d '{body}'", check=False)

    def etcd_full(self):
        self.say("etcd full")
        for action, wait in (("ACTIVATE", True), ("DEACTIVATE", False)):
            for member in self.members():
                body = f'{{"action": "{action}", "memberID": "{member}", "alarm": "NOSPACE"}}'
                sh(f"curl -s -m 5 -X POST {self.fleet.etcds[0]}/v3/maintenance/alarm -d '{body}'",
                   check=False)
            if wait:
                self.hold(5, 20)

    def members(self):
        said = sh(f"curl -s -m 5 -X POST {self.fleet.etcds[0]}/v3/cluster/member/list -d '{{}}'",
                  check=False)
        try:
            return [member["ID"] for member in json.loads(said)["members"]]
        except (ValueError, KeyError):
            return []

    def etcd_compact(self):
        self.say("etcd defragment")
        self.etcd_call("maintenance/defragment", "{}")

    def etcd_majority(self):
        members = self.fleet.of("etcd")
        victims = self.rng.sample(members, 2)
        how = self.rng.choice(["freeze", "kill"])
        self.say("etcd majority", how=how, members=[p.name for p in victims])
        for process in victims:
            if how == "freeze":
                process.signal(signal.SIGSTOP)
            else:
                process.wanted = False
                process.signal(signal.SIGKILL)
        self.hold(3, 20)
        for process in victims:
            process.signal(signal.SIGCONT)
            process.start()

    # Operators

    def scale(self):
        leader = self.fleet.leader()
        self.say("scale", leader=leader)
        if leader:
            for replicas in (1, 2):
                self.fleet.operate(["scale", "--replicas", str(replicas), "--server",
                              self.fleet.url(leader)])
                self.hold(3, 8)

    def drain(self):
        leader, worker = self.fleet.leader(), self.rng.choice(["w1", "w2-0", "w2-1", "w3", "w4"])
        self.say("drain", leader=leader, worker=worker)
        if leader:
            self.fleet.operate(["drain", worker, "--server", self.fleet.url(leader)])
            self.hold(3, 8)
            # The supervisor of several does not start a drained one again.
            if worker.startswith("w2"):
                self.fleet.processes["w2"].signal(signal.SIGTERM)


# Partitions have many forms, and twice the chance.
NAMES = ["kill", "kill_leader", "kill_child", "kill_all", "freeze", "freeze_leader", "end", "roll",
         "few_files", "little_memory", "partition", "partition", "lose", "delay",
         "partition_and_kill", "full_disk", "full_shm", "etcd_full", "etcd_compact",
         "etcd_majority", "scale", "drain"]
