"""What both papers predict before anything is run: closed forms (here), their curves, the printed numbers beside ours,
walltime on paper for devices that aren't here, and one round by hand.
"""

from outrider.theory.closed_forms import (
    acceptance_probability,
    alpha_from_tokens,
    best_gamma,
    d_lk,
    efficiency,
    expected_tokens,
    lenient_acceptance_probability,
    limit_tokens,
    loop_seconds,
    match_acceptance_probability,
    measured_speedup,
    memory_factor,
    minimal_walltime_factor,
    operations_factor,
    oracle_walltime_factor,
    rejection_acceptance_probability,
    walltime_factor,
)

__all__ = [
    "acceptance_probability",
    "alpha_from_tokens",
    "best_gamma",
    "d_lk",
    "efficiency",
    "expected_tokens",
    "lenient_acceptance_probability",
    "limit_tokens",
    "loop_seconds",
    "match_acceptance_probability",
    "measured_speedup",
    "memory_factor",
    "minimal_walltime_factor",
    "operations_factor",
    "oracle_walltime_factor",
    "rejection_acceptance_probability",
    "walltime_factor",
]
