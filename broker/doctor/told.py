"""Checks of the run, by what the broker tells of it in a Status. Pure."""

from __future__ import annotations

from narrows.broker.cli.plan import payload_bits
from narrows.broker.doctor.findings import Finding, failed, ok, unknown
from narrows.broker.verdict import NAMED_MAX, kept_out, refusal_remedy
from narrows.proto.codec import CODECS
from narrows.proto.messages import Status
from narrows.proto.wire import speaks_for


def refusals(status: Status, name: str) -> Finding:
    """No learner of a site was kept out lately; "" stands for all sites."""
    found = [each for each in reversed(kept_out(status)) if _is_of(name, each.learner)]
    if not found:
        return ok("nobody was kept out in the last ten minutes")
    texts = [f"{each.text} ({each.times} times, {each.ago_s:.0f} s ago)" for each in found]
    remedy = refusal_remedy(found[0]) or "narrows keys allow, with the site's line"
    return failed("; ".join(texts[:NAMED_MAX]), remedy)


def data(status: Status, name: str) -> Finding:
    """The data of a site's learners, or of all, move in both directions."""
    here = [each for learner, each in status.learners.items() if _is_of(name, learner)]
    hints = [each.hint for each in here if each.hint]
    if hints:
        return failed(" ".join(hints), "open the ports that it names, or see the line down")
    if not here:
        return unknown("no such learner was here in this life of the broker")
    return ok("what is announced comes, and versions are taken")


def _is_of(name: str, learner: str) -> bool:
    return not name or speaks_for(name, learner)


def needed_bits_per_s(status: Status) -> float:
    """Bits per second of one learner's pushes, as the run is now; 0 before its period is known."""
    settings = status.settings
    codec = next((each for each in CODECS if each == settings.push_codec), None)
    if codec is None or not status.period_s:
        return 0.0
    params = sum(each.elements for each in status.fragments)
    return params * payload_bits(codec, settings.push_rho) / status.period_s
