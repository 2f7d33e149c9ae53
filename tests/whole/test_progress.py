"""Progress where there is no terminal."""

from hubplugin.progress import LINE_SECONDS, lines


def test_a_job_without_a_terminal_tells_how_far_it_is_now_and_then():
    seconds, said = [0.0], []
    progress = lines(said.append, lambda: seconds[0])
    for done in range(1, 36):
        seconds[0] += LINE_SECONDS / 10
        progress("writing offsets", done, 35)
    assert said == [f"writing offsets: {done} of 35" for done in (10, 20, 30)]


def test_a_quick_job_says_nothing():
    said = []
    progress = lines(said.append, lambda: 0.0)
    progress("fitting", 1, 1)
    assert said == []
