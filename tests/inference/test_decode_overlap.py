"""Every kernel of a decoding step waits for the one before it, and asks for nothing but weights earlier.

A kernel that did not would compute right nearly always: its predecessor has nearly always ended. So the step's own
launches are compiled for a GPU that is not there, in a process that does not interpret, and their code is read.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent
# What the step's kernels may read before they wait: no kernel of the step writes it.
WEIGHTS = {"weight", "gamma", "q_weight", "kv_weight", "router"} | {
    f"shared_w{n}" for n in (1, 2, 3)
}
WAIT = re.compile(r"tt\.grid_dependency_wait|griddepcontrol\.wait")
TRIGGER = "griddepcontrol.launch_dependents"


def compiled(*arguments: object) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(HERE.parents[1])
    told = subprocess.run(
        [sys.executable, HERE / "compile_decode_step.py", *map(str, arguments)],
        capture_output=True, text=True, env=environment, cwd=HERE.parents[1],
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-2000:]
    return [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]


def before_the_wait(ttir: str) -> list[str]:
    """The lines of a kernel's body up to its wait, which must stand outside all branches and loops."""
    body = ttir[ttir.index("tt.func public") :].splitlines()[1:]
    depth = 0
    for i, line in enumerate(body):
        code = line.split(" loc(")[0]
        if WAIT.search(code):
            assert depth == 0, "the wait stands in a branch, so some programs do not wait"
            return body[:i]
        depth += code.count("{") - code.count("}")
    raise AssertionError("no wait")


def problems(launch: dict) -> list[str]:
    """What a launch does before it waits and must not: writes, and reads of what is no weight."""
    header = launch["ttir"].split("tt.func public")[1].split("\n")[0]
    arguments = re.findall(r"(%\w+): (!?[\w.]+)", header)
    names = launch["parameters"]
    if len(names) != len(arguments):  # a descriptor is several arguments; then no early read passes
        names = [f"argument {i}" for i in range(len(arguments))]
    # Of each value: the tensors that it, or its address, comes from.
    sources = {
        value: {name} if "ptr" in kind or "desc" in kind else set()
        for (value, kind), name in zip(arguments, names, strict=True)
    }
    opened: list[str] = []  # results of the branches that a line stands in
    found = []
    for line in before_the_wait(launch["ttir"]):
        code = line.split(" loc(")[0]
        values = re.findall(r"%[\w-]+", code)
        result = values.pop(0) if re.match(r"\s*%[\w:-]+ =", code) else ""
        read = set().union(*(sources.get(value, set()) for value in values))
        for target in {result, opened[-1] if "scf.yield" in code and opened else ""} - {""}:
            sources[target] = sources.get(target, set()) | read
        if re.search(r"\btt\.load\b", code):
            if not read <= WEIGHTS:
                found.append(f"{launch['kernel']} reads {sorted(read - WEIGHTS)} before it waits")
        elif re.search(r"store|atomic|descriptor|tt\.call|async|scf\.(for|while)", code):
            found.append(f"{launch['kernel']} before it waits: {code.strip()}")
        if code.rstrip().endswith("{") and "else" not in code:
            opened.append(result)
        elif code.strip().startswith("}") and "else" not in code:
            opened.pop()
    return found


@pytest.mark.parametrize("shared", [1, 2])
def test_every_kernel_waits_before_it_reads_or_writes_what_others_do(shared):
    """With two shared experts the routing is a kernel of its own, and the experts run twice."""
    launches = compiled(1, shared)
    names = {launch["kernel"] for launch in launches}
    assert names >= {"begin_kernel", "qkv_kernel", "decode_attention_kernel", "merge_splits_kernel"}
    assert names >= {"linear_kernel", "down_kernel", "best_of_block_kernel", "choose_kernel"}
    assert names & {"routed_up_kernel", "route_kernel"}
    assert [problem for launch in launches for problem in problems(launch)] == []
    for launch in launches:
        assert TRIGGER in launch["ptx"], launch["kernel"]
    # The first is launched plainly: it ends what came before the step, and all others overlap.
    assert [launch["launch_pdl"] for launch in launches] == [False] + [True] * (len(launches) - 1)


def test_without_overlap_nothing_of_it_is_left():
    for launch in compiled(0):
        assert not launch["launch_pdl"]
        assert "griddepcontrol" not in launch["ptx"]


CHAIN = """module {
  tt.func public @k(%a: !tt.ptr<f32> loc("a"), %b: !tt.ptr<f32> loc("b"), %n: i32 loc("n")) {
    EARLY
    WAIT
    %late = tt.load %b : !tt.ptr<f32> loc(#1)
    tt.return loc(#1)
  }
}"""
WAITS = "tt.grid_dependency_wait loc(#1)"
READ = (
    "%p = tt.addptr %a, %n : !tt.ptr<f32>, i32 loc(#1)\n    %v = tt.load %p : !tt.ptr<f32> loc(#1)"
)


@pytest.mark.parametrize(
    ("early", "wait", "a", "wanted"),
    [
        (READ, WAITS, "weight", None),
        (READ, WAITS, "x", "reads ['x']"),
        ("tt.store %a, %n : !tt.ptr<f32> loc(#1)", WAITS, "weight", "tt.store"),
        # An address that was read is no weight's: the experts' ids are the router's.
        (f"{READ}\n    %q = tt.addptr %b, %v : x loc(#1)\n    %w = tt.load %q loc(#1)", WAITS, "x", "reads"),
    ],
)  # fmt: skip
def test_the_reading_of_the_code_finds_what_is_wrong(early, wait, a, wanted):
    code = CHAIN.replace("EARLY", early).replace("WAIT", wait)
    found = problems({"kernel": "k", "parameters": [a, "weight", "n"], "ttir": code})
    assert (found == []) if wanted is None else (wanted in found[0])


def test_a_kernel_without_a_wait_or_with_one_in_a_branch_is_found():
    with pytest.raises(AssertionError, match="no wait"):
        before_the_wait(CHAIN.replace("EARLY", READ).replace("WAIT", ""))
    branch = f"scf.if %c {{\n      {WAITS}\n    }} loc(#1)"
    with pytest.raises(AssertionError, match="in a branch"):
        before_the_wait(CHAIN.replace("EARLY", READ).replace("WAIT", branch))
