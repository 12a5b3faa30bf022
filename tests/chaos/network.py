"""Hosts as network namespaces behind a bridge, and what can happen to the network between them."""
import subprocess
import sys
from pathlib import Path

CABLE = Path(__file__).with_name("cable.py")


def sh(command, check=True):
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """Packets are dropped where they arrive at a host or leave it, without a word."""

    def __init__(self, tag, subnet, names):
        self.tag = tag
        self.switch = f"{tag}-switch"
        self.subnet = f"10.{subnet // 256 + 214}.{subnet % 256}"
        self.gateway = f"{self.subnet}.1"
        self.addresses = {name: f"{self.subnet}.{at + 2}" for at, name in enumerate(names)}
        self.cables = {}

    def build(self):
        # The bridge has a namespace of its own: the machine's firewall has no say in it.
        switch = f"ip netns exec {self.switch}"
        sh(f"ip netns add {self.switch}")
        sh(f"{switch} ip link add bridge type bridge && {switch} ip link set dev bridge up")
        sh(f"ip link add {self.tag} type veth peer name gateway netns {self.switch}")
        sh(f"ip addr add {self.gateway}/24 dev {self.tag} && ip link set dev {self.tag} up")
        sh(f"{switch} ip link set dev gateway master bridge up")
        # The user-space cable hands packets on as it finds them: checksums must be there, and no
        # packet be longer than the cable takes.
        plain = "tx off tso off gso off gro off"
        sh(f"ethtool -K {self.tag} {plain} && {switch} ethtool -K gateway {plain}")
        for name, address in self.addresses.items():
            inside = f"ip netns exec {self.space(name)}"
            sh(f"ip netns add {self.space(name)}")
            sh(f"{inside} ip link add eth0 type veth peer name {name} netns {self.switch}")
            sh(f"{switch} ip link set dev {name} master bridge up")
            sh(f"{inside} ip link set dev lo up")
            sh(f"{inside} ip addr add {address}/24 dev eth0")
            sh(f"{inside} ip link set dev eth0 up")
            sh(f"{inside} ethtool -K eth0 {plain} && {switch} ethtool -K {name} {plain}")

    def remove(self):
        for name in list(self.cables):
            self.undelay(name)
        for name in self.addresses:
            sh(f"ip netns del {self.space(name)}", check=False)
        sh(f"ip link del {self.tag}", check=False)
        sh(f"ip netns del {self.switch}", check=False)

    def space(self, name):
        return f"{self.tag}-{name}"

    def rule(self, host, rule):
        sh(f"ip netns exec {self.space(host)} iptables -w 5 -A {rule}")

    def lose(self, host, share):
        """Loses this share of what arrives at the host, and of what leaves it."""
        for chain in ("INPUT ! -i lo", "OUTPUT ! -o lo"):
            odds = f"-m statistic --mode random --probability {share}"
            self.rule(host, f"{chain} {odds} -j DROP")

    def cut(self, host, peers, directions=("in", "out")):
        """Nothing passes between the host and its peers any more, in these directions."""
        for peer in peers:
            address = self.addresses.get(peer, self.gateway)
            if "in" in directions:
                self.rule(host, f"INPUT -s {address} -j DROP")
            if "out" in directions:
                self.rule(host, f"OUTPUT -d {address} -j DROP")

    def delay(self, host, milliseconds, jitter):
        """Every packet of the host's takes longer, in both directions."""
        switch = f"ip netns exec {self.switch}"
        near, far = f"{host}-near", f"{host}-far"
        sh(f"{switch} ip link add {near} type veth peer name {far}")
        sh(f"{switch} ip link set dev {near} up && {switch} ip link set {far} master bridge up")
        sh(f"{switch} ip link set dev {host} nomaster")
        cable = [sys.executable, str(CABLE), host, near, str(milliseconds), str(jitter)]
        self.cables[host] = subprocess.Popen([*switch.split(), *cable])

    def undelay(self, host):
        process = self.cables.pop(host, None)
        if process:
            process.kill()
            process.wait()
            switch = f"ip netns exec {self.switch}"
            sh(f"{switch} ip link set dev {host} master bridge", check=False)
            sh(f"{switch} ip link del {host}-near", check=False)

    def heal(self, host):
        self.undelay(host)
        sh(f"ip netns exec {self.space(host)} iptables -w 5 -F")
