"""The MCP server as an agent's program speaks to it: started as a command, asked by the SDK's own client."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from tests.whole.commands import COMMAND, write_photos

mcp = pytest.importorskip("mcp", reason="pip install '.[mcp]'")

pytestmark = pytest.mark.slow

DATA = Path(__file__).parent.parent.parent / "examples" / "data"


@pytest.fixture(scope="module")
def made(tmp_path_factory, real):
    folder = tmp_path_factory.mktemp("mcp")
    write_photos(folder, real)
    return folder


def asked(*calls):
    """The tools of a server, and what it answers to `calls`: name and arguments each."""

    async def spoken():
        paths = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        started = mcp.StdioServerParameters(command=str(COMMAND), args=["mcp"], env=paths)
        async with mcp.Client(started) as client:
            listed = (await client.list_tools()).tools
            return {tool.name: tool for tool in listed}, [await client.call_tool(*call) for call in calls]

    return asyncio.run(asyncio.wait_for(spoken(), 300))


def test_an_agent_inspects_diagnoses_and_evaluates_and_nothing_changes(made):
    store = f"faiss:{made / 'photos.faiss'}"
    before = {path: path.read_bytes() for path in made.iterdir()}
    bank = str(DATA / "bank_queries.npy")
    tools, (inspected, diagnosed, evaluated, wrong) = asked(
        ("inspect", {"store": store}),
        ("diagnose", {"store": store, "bank": bank}),
        (
            "evaluate",
            {
                "queries": str(DATA / "test_queries.npy"),
                "targets": str(DATA / "test_targets.npy"),
                "bank": bank,
                "method": ["nnn k=16"],
            },
        ),
        ("diagnose", {"store": store, "bank": "none.npy"}),
    )
    assert sorted(tools) == ["diagnose", "evaluate", "inspect"]
    for tool in tools.values():
        assert tool.annotations.read_only_hint
        assert all(each.get("description") for each in tool.input_schema["properties"].values())
    assert "No correction" in inspected.content[0].text
    assert "hub" in diagnosed.content[0].text
    assert "nnn" in evaluated.content[0].text
    assert evaluated.structured_content
    assert wrong.is_error
    assert "none.npy" in wrong.content[0].text
    assert {path: path.read_bytes() for path in made.iterdir()} == before


def test_an_argument_that_a_tool_does_not_take_is_an_error_and_no_silence(made):
    store = f"faiss:{made / 'photos.faiss'}"
    bank = str(DATA / "bank_queries.npy")
    tools, answers = asked(
        ("inspect", {"store": store, "report": "page.html"}),
        ("diagnose", {"store": store, "bank": bank, "embed": "os:system"}),
        ("diagnose", {"store": store, "querys": bank}),
    )
    assert all(tool.input_schema["additionalProperties"] is False for tool in tools.values())
    assert all(answer.is_error for answer in answers)
    said = [answer.content[0].text for answer in answers]
    assert "inspect takes no argument 'report'; it takes store, names, device, memory" in said[0]
    assert "diagnose takes no argument 'embed'; " in said[1]
    assert "diagnose takes no argument 'querys'; it takes store, bank, " in said[2]


def test_an_error_shows_nothing_of_the_file_that_it_is_about(made, tmp_path):
    """An agent may name any file."""
    names = [f"key{kind}" for kind in ("", ".faiss", ".npy", ".npz", ".safetensors", ".parquet", ".json", ".txt")]
    for name in names:
        (tmp_path / name).write_text("hunter2 is the password\n")
    store, bank = f"faiss:{made / 'photos.faiss'}", str(DATA / "bank_queries.npy")
    calls = [("inspect", {"store": f"faiss:{tmp_path / name}"}) for name in names]
    calls += [("diagnose", {"store": store, "bank": str(tmp_path / name)}) for name in names]
    calls += [("evaluate", {"store": store, "queries": bank, "truth": str(tmp_path / name)}) for name in names]
    _, answers = asked(*calls)
    for call, answer in zip(calls, answers, strict=True):
        assert answer.is_error, call
        text = answer.content[0].text
        assert "\n" not in text
        assert not any(part in text for part in ("hunt", "68756e74", "746e7568")), (call, text)


def test_no_tool_takes_a_file_to_write_or_code_to_run():
    tools, _ = asked()
    given = {name for tool in tools.values() for name in tool.input_schema["properties"]}
    assert not given & {"report", "embed", "force"}


def test_a_store_that_one_process_holds_is_let_go_after_each_call(tmp_path):
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(tmp_path / "local"))
    client.create_collection("photos", models.VectorParams(size=4, distance=models.Distance.DOT))
    client.upload_collection("photos", np.random.default_rng(1).normal(size=(20, 4)))
    client.close()
    call = ("inspect", {"store": f"qdrant-local:{tmp_path / 'local'}/photos"})
    _, found = asked(call, call)
    assert ["No correction" in each.content[0].text for each in found] == [True, True]
