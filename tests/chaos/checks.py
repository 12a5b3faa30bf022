"""What must hold while things break, and afterwards."""
import os
import re
import subprocess
import threading
import time

LINE = re.compile(r"^([a-z_:]+)(\{.*\})? ([-+0-9.eEInfNa]+)$")
OWN = ("tutti_membership_", "process_", "tutti_build")


def parse(page):
    series, kinds = {}, {}
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            kinds[name] = kind
        match = LINE.match(line)
        if match:
            series[match[1] + (match[2] or "")] = float(match[3])
    return series, kinds


def total(series, name):
    return sum(value for key, value in series.items() if key.split("{")[0] == name)


class Watch(threading.Thread):
    """Scrapes all coordinators, and measures all processes."""

    def __init__(self, fleet, promtool):
        super().__init__(daemon=True)
        self.fleet, self.promtool = fleet, promtool
        self.highest, self.samples, self.last = {}, [], ""

    def run(self):
        turn = 0
        while self.fleet.running:
            turn += 1
            for process in self.fleet.of("coordinator"):
                code, page = self.fleet.get(process.name, "/metrics", 2.0)
                if code == 200:
                    self.judge(process.name, page, turn)
            if turn % 5 == 1:
                self.measure()
            time.sleep(1.0)

    def judge(self, name, page, turn):
        series, kinds = parse(page)
        if total(series, "tutti_requests_accepted_total") == 0:
            return
        self.last = page
        if turn % 20 == 0:
            done = subprocess.run([self.promtool, "check", "metrics"], input=page, text=True,
                                  capture_output=True)
            if done.returncode not in (0, 3):
                self.fleet.violation("promtool", said=done.stderr[:500])
        fallen = []
        for key, value in series.items():
            base = key.split("{")[0]
            kind = kinds.get(base) or kinds.get(re.sub("_(bucket|count|sum)$", "", base))
            if kind not in ("counter", "histogram") or base.startswith(OWN):
                continue
            if value < self.highest.get(key, (0, "", 0))[0] * (1 - 1e-9):
                fallen.append((key, value, *self.highest[key]))
            self.highest[key] = (value, name, round(time.time() - self.fleet.began, 1))
        # What was shown while etcd was away may be lost with the leader that showed it.
        faults = [it for it in self.fleet.events if it["kind"] == "fault"]
        away = any("etcd" in it["what"] or "etcd" in it.get("role", "")
                   or any(e in str(it) for e in ("'e1'", "'e2'", "'e3'"))
                   for it in faults if it["t"] > time.time() - self.fleet.began - 60)
        if fallen:
            self.highest = {}
        if fallen and not away:
            self.fleet.violation("a total fell", of=name, count=len(fallen), first=fallen[:3])
        flight = total(series, "tutti_requests_in_flight")
        parts = sum(total(series, f"tutti_requests_{it}") for it in
                    ("running", "waiting", "swapped"))
        accepted = total(series, "tutti_requests_accepted_total")
        ended = total(series, "tutti_request_success_total")
        if flight != parts or ended + flight != accepted:
            self.fleet.violation("identity", flight=flight, parts=parts, accepted=accepted,
                                 ended=ended, of=name)

    def measure(self):
        for process in list(self.fleet.processes.values()):
            for pid in process.pids():
                try:
                    with open(f"/proc/{pid}/status") as file:
                        text = file.read()
                    files = len(os.listdir(f"/proc/{pid}/fd"))
                except OSError:
                    continue
                rss = re.search(r"VmRSS:\s+(\d+)", text)
                threads = re.search(r"Threads:\s+(\d+)", text)
                if rss and threads:
                    self.samples.append((time.time() - self.fleet.began, process.name, pid,
                                         int(rss[1]), files, int(threads[1])))

    def growth(self):
        """First and last measurement of each process that lived for long."""
        lives = {}
        for at, name, pid, rss, files, threads in self.samples:
            lives.setdefault((name, pid), []).append((at, rss, files, threads))
        for (name, pid), rows in sorted(lives.items()):
            if rows[-1][0] - rows[0][0] > 60:
                third = len(rows) // 3
                mid, end = rows[third], rows[-1]
                yield (f"{name:5} {pid:7} lived {end[0] - rows[0][0]:6.0f} s  "
                       f"RSS {mid[1] // 1024:4}..{end[1] // 1024:4} MiB  "
                       f"files {mid[2]:3}..{end[2]:3}  threads {mid[3]:3}..{end[3]:3}")


def whole(fleet):
    """Why the cluster is not whole, or nothing."""
    leader = fleet.leader()
    if not leader:
        return "no coordinator is ready"
    status = fleet.status(leader)
    if status is None:
        return "no status"
    replicas = [(replica["state"], replica["ranks"]) for replica in status["replicas"]]
    if [(state, len(ranks)) for state, ranks in replicas] != [("serving", 2)] * 2:
        return f"replicas: {replicas}"
    for front in fleet.of("frontend"):
        if not fleet.ready(front.name):
            return f"{front.name} is not ready: {fleet.get(front.name, '/ready')[1][:200]}"
    for other in fleet.of("coordinator"):
        if other.name != leader and not fleet.get(other.name, "/live")[0] == 200:
            return f"{other.name} does not live"
    return None


def logs(fleet, words):
    """Lines of logs that must not be."""
    for process in fleet.processes.values():
        if process.role == "etcd" or not process.log.exists():
            continue
        with open(process.log, errors="replace") as file:
            for line in file:
                if "panicked" in line or any(word in line for word in words):
                    yield process.name, line.strip()[:400]


def unexplained(fleet):
    """Answers of front ends that nothing done to them explains, with how often they came."""
    found = {}
    faults = [event for event in fleet.events if event["kind"] == "fault"]
    for event in fleet.events:
        if event["kind"] != "answer" or not event["target"].startswith("f"):
            continue
        began, ended = event["began"] - 1, event["began"] + event["took"] + 1
        mine = [fault for fault in faults
                if event["target"] in (fault.get("process"), fault.get("host"))
                or fault.get("role") == "frontend"]
        if any(began - 40 < fault["t"] < ended for fault in mine):
            continue
        key = event["outcome"] + ": " + re.sub(r"[0-9a-f]{8,}|[0-9]+", "N", event["said"])[:200]
        found.setdefault(key, []).append(round(ended - 1, 1))
    return found
