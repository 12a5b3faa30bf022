"""A slow cable: hands packets on between two interfaces, each after a while.

`cable.py ONE OTHER MILLISECONDS JITTER`. For kernels that lack netem.
"""
import heapq
import random
import select
import socket
import sys
import time

OUTGOING = 4


def main():
    one, other, delay, jitter = sys.argv[1:]
    ends = []
    for name in (one, other):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        end.bind((name, 0))
        end.setblocking(False)
        ends.append(end)
    queue, number, last = [], 0, [0.0, 0.0]
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        readable, _, _ = select.select(ends, [], [], wait)
        for end in readable:
            side = ends.index(end)
            while True:
                try:
                    packet, address = end.recvfrom(65536)
                except BlockingIOError:
                    break
                if address[2] == OUTGOING:
                    continue
                span = (float(delay) + random.uniform(-1, 1) * float(jitter)) / 1000
                # In order, as most cables are.
                last[side] = max(last[side], time.monotonic() + max(span, 0.0))
                number += 1
                heapq.heappush(queue, (last[side], number, 1 - side, packet))
        while queue and queue[0][0] <= time.monotonic():
            _, _, side, packet = heapq.heappop(queue)
            try:
                ends[side].send(packet)
            except OSError:
                pass


main()
