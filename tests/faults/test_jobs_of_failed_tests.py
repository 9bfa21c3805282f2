"""A job that a failed test leaves behind is killed before the next test."""

from helpers.launcher import kill_started, marked, shell, start, until

STARTS_MORE = "for i in $(seq 100); do sleep 300 & sleep 0.01; done; wait"


def test_all_processes_of_a_job_are_killed_also_those_it_starts_meanwhile(
    tmp_path, marker
):
    start(tmp_path, "-np", "2", *shell(STARTS_MORE), MARK=marker)
    until(lambda: len(marked(marker)) >= 5, 20.0)  # tfdistrun, its guard, the ranks
    kill_started()
    until(lambda: not marked(marker))
