"""The state of a core while something was timed, told from the rates of bench/slots.h before and
after it.

quiet: nothing else used the core; busy: another hardware thread did, before and after; mixed: it
came or went, or used little; unknown: this architecture has no such rates.
"""

STATES = ("quiet", "busy", "mixed", "unknown")
# Of what no-ops leave of the rate on a quiet core; a busy one is at 0.6 to 0.97.
QUIET, BUSY = 0.98, 0.9
# Is what they leave there if the core dispatches only 4 instructions a cycle; if more, they leave
# all.
FOUR_SLOTS = 6 / 7
# Of the best rate alone; below, another thread takes the multipliers themselves.
SLOWEST_CLOCK = 0.75


def best_of(rates):
    """Of all (rate alone, rate with no-ops) of a run: the best rate alone, and the largest share of
    it that no-ops leave."""
    return max((alone for alone, _ in rates), default=0), min(
        1, max([FOUR_SLOTS, *(with_no_ops / alone for alone, with_no_ops in rates if alone)])
    )


def state_of(before, after, best):
    """Both (rate alone, rate with no-ops), in whose quotient the clock of the moment cancels; best:
    of the run."""
    if not best[0]:
        return "unknown"
    shares = [
        with_no_ops / alone / best[1] if alone >= SLOWEST_CLOCK * best[0] else 0
        for alone, with_no_ops in (before, after)
    ]
    return "quiet" if min(shares) >= QUIET else "busy" if max(shares) < BUSY else "mixed"


def shares_of(states):
    """The share of each state that occurs."""
    return {state: states.count(state) / len(states) for state in STATES if state in states}
