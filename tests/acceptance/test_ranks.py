"""Several ranks are one learner, beside a single process. `make test-ranks` has more."""

from acceptance.kit import Site
from ranks.island import Island
from ranks.kit import check_whole_run


def test_two_ranks_end_with_the_bits_of_a_single_process(site: Site) -> None:
    site.broker("run.learners_at_start=2", "fragments.count=3", goal_tokens=6_000)
    check_whole_run(site, Island("fsdp", 2), merged=5)
