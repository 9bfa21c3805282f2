"""A job that a failed test leaves behind is killed before the next test."""

from helpers.launcher import kill_started, marked, shell, start, until


def test_all_processes_of_a_job_are_killed(tmp_path, marker):
    start(tmp_path, "-np", "2", *shell("sleep 300; :"), MARK=marker)
    until(lambda: len(marked(marker)) >= 5, 20.0)  # tfdistrun, its guard, the ranks
    kill_started()
    until(lambda: not marked(marker))
