"""Tests that the report holds the numbers, needs no other file, and can be made from few data."""

import html.parser
import io
import json
import re

import pytest

from rl_accel.console import wide_console
from rl_accel.lab.ab import report


@pytest.fixture
def build(make_runs, tmp_path):
    """Build a report from metrics given as run name -> records; returns the summary."""

    def make(runs, load=0.1, files=None, **changes):
        recipe, results, data = make_runs(runs, files, **changes)
        for result in results:
            result.first_step_at, result.load_average = 3.0, load
        return report.build(recipe, tmp_path / "recipe.yaml", tmp_path, results, len(runs), data)

    return make


def records(adv, steps=6, **changed):
    made = {}
    for step in range(1, steps + 1):
        made[step] = {"timing_s/gen": 1.0, "timing_s/adv": adv, "timing_s/step": 1.5 + adv}
        made[step] |= {"critic/score/mean": step / 10, "response_length/mean": 5, **changed}
    return made


def shown(summary):
    """What the console says."""
    console = wide_console(report.WIDTH, markup=False, highlight=False, file=io.StringIO())
    report.show(summary, console)
    return console.file.getvalue()


class _Page(html.parser.HTMLParser):
    void = frozenset({"meta", "img", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.images = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [given[name] for name in ("href", "src") if name in given]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing_and_the_console_shows_stages_checks_and_verdicts(build, tmp_path):
    runs = {"stock-seed0": records(0.5), "accelerated-seed0": records(0.1)}
    summary = build(runs, description="<script>alert(1)</script>", checks={"faster": {"adv": 50}})
    text = (tmp_path / "report.html").read_text()
    page = _Page(text)
    assert (page.open, len(page.links)) == ([], 1)
    assert "<script>" not in text
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert "1.25x" in text  # 2.0 s against 1.6 s
    assert "5.00x" in text
    assert "is identical in all 6 steps; so are all 2 training metrics" in text
    assert "E=1 p &#39;a=[1, 2]&#39;" in text
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    text = shown(summary)
    assert "Mean time of each stage, steps 3-6; at most 2 steps of warm-up of each run" in text
    assert re.search(r"adv +\S +0\.5 s +\S +0\.1 s +\S +5\.00x", text)
    assert re.search(r"faster +\S +red", text)
    assert "Red checks: faster." in text


def test_the_summary_holds_all_numbers_and_is_strict_json(build, tmp_path):
    nan = float("nan")
    result = build({"stock-seed0": records(0.5, x=nan), "accelerated-seed0": records(0.1, x=nan)}, load=1000.0)
    assert any("busy when stock-seed0 started (load 1000.0 on" in line for line in result["headline"])
    text = (tmp_path / "summary.json").read_text()
    assert not re.search(r"\b(NaN|Infinity)\b", text)
    summary = json.loads(text)
    assert summary["measured_steps"] == {"stock-seed0": [3, 6], "accelerated-seed0": [3, 6]}
    assert summary["curves"]["timing_s/step"]["stock-seed0"]["values"] == [2.0] * 6
    assert summary["runs"][0]["startup_seconds"] == 1.0
    assert summary["runs"][0]["reward"] == {"before": 0.1, "after": 0.6, "gain": 0.5}
    assert summary["environment"]["versions"]["torch"]


def test_a_difference_is_listed_with_its_step_and_size(build, tmp_path):
    other = records(0.1)
    other[4]["critic/score/mean"] = 0.5
    other[3]["actor/grad_norm"] = 1.0
    base = records(0.5)
    base[3]["actor/grad_norm"] = 1.25
    summary = build({"stock-seed0": base, "accelerated-seed0": other})
    (verdict,) = summary["differences"]
    assert verdict["parts_at"] == 4
    assert "parts at step 4 (0.4 and 0.5)" in verdict["text"]
    first = "2 of 3 training metrics differ somewhere, first actor/grad_norm at step 3 by 2.5e-01"
    assert first in verdict["text"]
    assert "first difference of each metric" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "runs",
    [
        {},
        {"stock-seed0": {}},
        {"stock-seed0": {0: {"val/x": 1.0}}},
        {"stock-seed0": records(0.1, steps=1)},
        {"accelerated-seed0": records(0.1)},
        {"stock-seed0": records(0.1), "accelerated-seed1": records(0.1)},
        {"stock-seed0": records(0.1), "accelerated-seed0": {}},
    ],
)
def test_thin_data_still_make_a_report(build, tmp_path, runs):
    (tmp_path / "reward.png").write_bytes(b"old")
    summary = build(runs)
    assert runs or not (tmp_path / "reward.png").exists(), "a stale plot is removed when there is nothing to draw"
    shown(summary)
    assert _Page((tmp_path / "report.html").read_text()).open == []
    assert json.loads((tmp_path / "summary.json").read_text())["differences"] == []


def test_a_report_about_rollouts_has_its_table_and_its_ledger(build, tmp_path):
    prefix = "rl_accel/tail_batching/"
    ours = records(0.5, **{"timing_s/gen": 0.4, prefix + "short_round": 1.0})
    for metrics in ours.values():
        metrics |= {prefix + "tokens_generated": 100.0, prefix + "tokens_wasted": 30.0}
    files = {"accelerated-seed0": {"tail_batching/ledger.jsonl": json.dumps({"step": 1, "trained": ["1:1", "1:2"]})}}
    rollout = {"report": True, "faster": {"accelerated": 2.0}}
    summary = build({"stock-seed0": records(0.5), "accelerated-seed0": ours}, files=files, rollout=rollout)
    text = (tmp_path / "report.html").read_text()
    assert _Page(text).open == []
    assert "2.50x" in text
    assert "30.0%" in text
    assert "Do the arms train the same?" not in text
    assert "Mean rollout seconds a step" in shown(summary)
