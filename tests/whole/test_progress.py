"""Progress where there is no terminal."""

from hubplugin.progress import LINE_SECONDS, lines


def test_a_job_without_a_terminal_tells_its_start_how_far_it_is_and_its_time():
    seconds = [0.0]
    said = []
    with lines(said.append, lambda: seconds[0]) as progress:
        for done in range(1, 36):
            seconds[0] += LINE_SECONDS / 10
            progress("writing offsets", done, 35)
    first, *between, last = said
    assert "writing offsets" in first
    assert between == [f"writing offsets: {done} of 35" for done in (11, 21, 31)]
    assert "35 s" in last


def test_a_quick_job_has_two_lines_and_one_that_computes_nothing_none():
    said = []
    with lines(said.append, lambda: 0.0) as progress:
        assert said == []
        for done in range(5):
            progress("fitting", done, 5)
    assert len(said) == 2
    said.clear()
    with lines(said.append, lambda: 0.0):
        pass
    assert said == []
