"""Whether other programs ran beside a measurement."""

import os
import resource
import time


def _taken():
    """Seconds of all processors that were not idle."""
    user, nice, system, idle, iowait, *rest = map(int, open("/proc/stat").readline().split()[1:])
    return (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")


def _own():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Others:
    """What other programs take from now on; children of this one count when they have ended."""

    def __init__(self):
        self.start, self.taken = time.monotonic(), _taken() - _own()

    def share(self):
        """Of all processors, until now."""
        return (_taken() - _own() - self.taken) / max(time.monotonic() - self.start, 1e-9) / os.cpu_count()
