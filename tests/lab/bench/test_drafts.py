import json
import random

import pytest

from rl_accel.lab.bench.drafts import bench_drafts, replay

SETTINGS = {"max_tokens": 8, "batch_limit": 32, "memory_mb": 1, "epochs": 2}


def text(rng, length):
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length))


def test_a_second_epoch_of_like_responses_takes_fewer_steps(tmp_path, invoke):
    rng = random.Random(0)
    alike = {name: text(rng, 400) for name in ("question a", "question b")}
    rows = list(alike.items())
    for step, pairs in enumerate([rows, rows, [("another", "\u2028" + text(rng, 50))]], 1):  # as verl writes them
        lines = [{"input": p, "output": answer, "score": 0.0, "step": step} for p, answer in pairs]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in lines]
        (tmp_path / f"{step}.jsonl").write_text("".join(lines), encoding="utf-8")
    output = invoke(bench_drafts, *sorted(tmp_path.glob("*.jsonl")))
    lines = [line.split() for line in output.splitlines()]
    epochs = {line[0]: float(line[2]) for line in lines if len(line) == 3 and line[0] in ("1", "2")}
    assert epochs["1"] < 0.2
    assert epochs["2"] > 3
    # two requests at once, 400 steps each epoch, and 51 of one request
    assert "without drafts 851 engine steps" in output


def test_every_response_is_played_whole_whatever_the_places(tmp_path):
    rng = random.Random(1)
    steps = [[([1, 2, 3], [rng.randrange(4) for _ in range(rng.randrange(60))]) for _ in range(20)] for _ in range(3)]
    for running in (1, 7, 64):
        result = replay(steps, running, SETTINGS)
        counts, epochs = result.counts, result.epochs
        assert sum(map(len, result.seconds.values())) == counts["steps"]
        assert counts["tokens"] == sum(len(tokens) for step in steps for _, tokens in step)
        assert counts["accepted"] == sum(accepted for accepted, _ in epochs.values())
        assert sum(accepted + row_steps for accepted, row_steps in epochs.values()) == counts["tokens"]
        assert set(epochs) == {1, 2, 3}
        assert result.engine_steps[True] <= result.engine_steps[False]


@pytest.mark.parametrize(("line", "said"), [('{"input": "a", "step": 1}', "KeyError"), ("no", "JSONDecodeError")])
def test_a_file_of_another_kind_is_named(tmp_path, invoke, line, said):
    (tmp_path / "1.jsonl").write_text(line + "\n")
    output = invoke(bench_drafts, tmp_path / "1.jsonl", code=1)
    assert said in output
    assert "1.jsonl" in output
