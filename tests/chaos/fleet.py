"""The processes of a cluster, each on a host of its own, started again when they end."""
import json
import os
import resource
import signal
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

from network import sh

EXPECTED = {0, 1, 75, -signal.SIGKILL, -signal.SIGTERM}


class Process:
    """One process and what supervises it."""

    def __init__(self, fleet, name, host, role, argv):
        self.fleet, self.name, self.host, self.role, self.argv = fleet, name, host, role, argv
        self.log = fleet.folder / host / "disk" / f"{name}.log"
        self.child, self.wanted, self.limits = None, False, {}
        self.ends = []
        self.starts = 0
        self.lock = threading.Lock()

    def start(self):
        with self.lock:
            self.wanted = True
            if self.child and self.child.poll() is None:
                return
            network, limits = self.fleet.network, dict(self.limits)
            shm = self.fleet.folder / self.host / "shm"

            def prepare():
                os.setsid()
                os.nice(10)
                for what, bound in limits.items():
                    resource.setrlimit(what, (bound, bound))

            script = f'mount --bind {shm} /dev/shm; exec "$@"'
            command = ["ip", "netns", "exec", network.space(self.host), "sh", "-c", script, "sh"]
            # A file on a full disk may not be opened, and the process must start all the same.
            with open(self.log, "ab", buffering=0) as log:
                self.child = subprocess.Popen(
                    command + self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    preexec_fn=prepare, env=dict(os.environ, RUST_BACKTRACE="1"))
            self.starts += 1

    @property
    def pid(self):
        return self.child.pid if self.child and self.child.poll() is None else None

    def signal(self, number):
        if self.pid:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def pids(self):
        """Its own id and those of its children."""
        if not self.pid:
            return []
        children = sh(f"cat /proc/{self.pid}/task/*/children", check=False).split()
        return [self.pid, *map(int, children)]

    def watch(self):
        if self.child and self.child.poll() is not None and self.wanted:
            code = self.child.poll()
            self.ends.append((time.time(), code))
            self.fleet.note("end", process=self.name, code=code)
            # Without memory there is no other end.
            starved = code == -signal.SIGABRT and resource.RLIMIT_AS in self.limits
            if code not in EXPECTED and not starved:
                self.fleet.violation("exit code", process=self.name, code=code)
            self.child = None
            threading.Timer(1.0, lambda: self.wanted and self.start()).start()


class Fleet:
    """Everything that runs."""

    def __init__(self, folder, network, tutti, etcd, model, options):
        self.folder, self.network = Path(folder), network
        self.events, self.violations = [], []
        self.journal = open(self.folder / "journal.jsonl", "a", buffering=1)
        self.began = time.time()
        self.options = options
        for host in network.addresses:
            for part, size in (("shm", "64m"), ("disk", "64m")):
                (self.folder / host / part).mkdir(parents=True)
                sh(f"mount -t tmpfs -o size={size} tmpfs {self.folder / host / part}")
        secret = self.folder / "secret"
        secret.write_text("a-secret-that-no-log-may-show-0123456789\n")
        secret.chmod(0o600)
        keys = self.folder / "keys"
        keys.write_text("key-that-no-log-may-show\n")
        keys.chmod(0o600)
        members = [host for host in network.addresses if host.startswith("e")]
        address = network.addresses
        cluster = ",".join(f"{m}=http://{address[m]}:2380" for m in members)
        self.etcds = [f"http://{address[m]}:2379" for m in members]
        shared = ["--etcd", ",".join(self.etcds), "--cluster-secret-file", str(secret)]
        api = ["--api-key-file", str(keys), "--drain-timeout", "10"]
        self.processes = {}

        def add(name, role, argv):
            self.processes[name] = Process(self, name, name, role, argv)

        for host, ip in address.items():
            disk = self.folder / host / "disk"
            if host.startswith("e"):
                add(host, "etcd", [
                    etcd, "--name", host, "--data-dir", str(self.folder / host / "data"),
                    "--listen-client-urls", f"http://{ip}:2379,http://127.0.0.1:2379",
                    "--advertise-client-urls", f"http://{ip}:2379",
                    "--listen-peer-urls", f"http://{ip}:2380",
                    "--initial-advertise-peer-urls", f"http://{ip}:2380",
                    "--initial-cluster", cluster, "--initial-cluster-state", "new",
                    "--log-level", "error",
                    "--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1m"])
            elif host.startswith("c"):
                add(host, "coordinator", [
                    tutti, "coordinator", *shared, *api, "--model", model,
                    "--listen", "0.0.0.0:8000", "--cluster-listen", "0.0.0.0:8001",
                    "--log-stats-json", str(disk / "stats.jsonl"), *options])
            elif host.startswith("f"):
                add(host, "frontend", [
                    tutti, "frontend", *shared, *api, "--listen", "0.0.0.0:8010",
                    "--model", model, "--node", host])
            elif host.startswith("w2"):
                add(host, "worker", [tutti, "worker", *shared, "--node", host, "--threads", "1",
                                     "--workers", "2", "--device", "cpu"])
            else:
                add(host, "worker", [tutti, "worker", *shared, "--node", host, "--threads", "1",
                                     "--device", "cpu"])
        self.running = True
        threading.Thread(target=self.supervise, daemon=True).start()

    def supervise(self):
        while self.running:
            for process in self.processes.values():
                process.watch()
            time.sleep(0.1)

    def of(self, role):
        return [p for p in self.processes.values() if p.role == role]

    def note(self, kind, **what):
        what = {"t": round(time.time() - self.began, 2), "kind": kind, **what}
        self.events.append(what)
        self.journal.write(json.dumps(what) + "\n")

    def violation(self, what, **more):
        self.violations.append(what)
        self.note("VIOLATION", what=what, **more)
        print(f"{time.time() - self.began:7.1f} VIOLATION {what} {more}", flush=True)

    def url(self, name):
        port = 8010 if name.startswith("f") else 8000
        return f"http://{self.network.addresses[name]}:{port}"

    def get(self, name, path, timeout=3.0):
        request = urllib.request.Request(self.url(name) + path)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, ValueError) as error:
            return 0, str(error)

    def ready(self, name):
        return self.get(name, "/ready", 2.0)[0] == 200

    def leader(self):
        """The coordinator that says it is ready."""
        for process in self.of("coordinator"):
            if self.ready(process.name):
                return process.name
        return None

    def tool(self, argv, timeout=40):
        """Runs `tutti ARGV` as an operator."""
        tutti = self.of("coordinator")[0].argv[0]
        secret = str(self.folder / "secret")
        done = subprocess.run([tutti, *argv, "--cluster-secret-file", secret],
                              capture_output=True, text=True, timeout=timeout)
        return done.returncode, (done.stdout + done.stderr).strip()

    def operate(self, argv):
        try:
            code, said = self.tool(argv)
            self.note("operator", argv=argv, code=code, said=said[-300:])
        except Exception as error:
            self.note("operator", argv=argv, error=repr(error))

    def status(self, name):
        code, said = self.tool(["status", "--json", "--server", self.url(name)])
        return json.loads(said) if code == 0 else None

    def start(self, role):
        for process in self.of(role):
            process.start()

    def wait(self, what, seconds):
        """Waits until it is so. The time it took, or nothing."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if what():
                return time.monotonic() - began
            time.sleep(0.25)
        return None

    def stop(self):
        self.running = False
        for process in self.processes.values():
            process.wanted = False
            if process.pid:
                process.signal(signal.SIGCONT)
                os.killpg(process.pid, signal.SIGKILL)
                process.child.wait()
        time.sleep(0.5)
        for host in self.network.addresses:
            for part in ("shm", "disk"):
                if part == "disk":
                    sh(f"cp -r {self.folder / host / part}/. {self.folder / host}/", check=False)
                sh(f"umount -l {self.folder / host / part}", check=False)
