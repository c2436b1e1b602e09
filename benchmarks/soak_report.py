"""Summary of a soak's files: faults injected against faults recorded, recovery times, memory, metrics."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from client_pipeline.runtime.control_unit.fault_files import read_injected

INJECTED_KINDS = ("device", "cluster", "stream", "freeze", "partition", "server")
METRIC_POINTS, GROWTH = 2.0, 0.05
"""The metric may differ by so many points, and memory grow by this share from round 10 to the end."""
Json = dict[str, Any]


def lines_of(path: Path) -> list[Json]:
    """JSON lines of a file; none where there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def injected_in(run_dir: Path) -> list[Json]:
    """All faults that were injected into a run."""
    folders = [run_dir, *sorted(run_dir.glob("clusters/cluster-*"))]
    return sorted((event for folder in folders for event in read_injected(folder)), key=lambda event: event["time"])


def recorded_in(run_dir: Path) -> list[Json]:
    """All faults in the lines of a run's rounds."""
    return [fault for line in lines_of(run_dir / "rounds.jsonl") for fault in line["faults"]]


def said(run_dir: Path) -> str:
    """Counts so far."""
    injected = Counter(event["kind"] for event in injected_in(run_dir))
    recorded = Counter(fault["kind"] for fault in recorded_in(run_dir))
    kinds = sorted(injected.keys() | recorded.keys())
    return ", ".join(f"{kind} {injected[kind]} injected {recorded[kind]} recorded" for kind in kinds) or "no faults"


def count(injected: Sequence[Json], recorded: Sequence[Json], restarts: Sequence[tuple[int, float]]) -> Json:
    """Hold the faults that were injected against those that were recorded, one by one.

    Parameters
    ----------
    injected, recorded : as in the files
    restarts : of each process that went on: the last round that was there, and when it began [s]; what was injected
        into a later round before that time died with the server, and the round was trained again

    Returns
    -------
    By kind: ``injected``, ``died_with_server``, ``recorded``, ``missed`` (injected, but not recorded) and
    ``not_injected`` (recorded, but not injected, or twice).
    """
    died, left = Counter[str](), []
    for event in injected:
        again = event["kind"] != "server" and any(
            event["round"] > round_ and event["time"] < began for round_, began in restarts
        )
        if again:
            died[event["kind"]] += 1
        else:
            left.append(_key(event))
    # The soak itself may have been stopped and called again.
    left += [("server",)] * max(len(restarts) - left.count(("server",)), 0)
    # A device is back, or was found slow, by itself.
    found = _told_apart([_key(fault) for fault in recorded if fault["kind"] != "joined"], left)
    missed, extra = Counter(left) - Counter(found), Counter(found) - Counter(left)
    kinds = dict.fromkeys([*INJECTED_KINDS, *(key[0] for key in found)])
    return {
        kind: {
            "injected": sum(event["kind"] == kind for event in injected),
            "died_with_server": died[kind],
            "recorded": sum(key[0] == kind for key in found),
            "missed": sum(n for key, n in missed.items() if key[0] == kind),
            "not_injected": sum(n for key, n in extra.items() if key[0] == kind),
            "which": [list(key) for key in [*missed, *extra] if key[0] == kind],
        }
        for kind in kinds
    }


def _told_apart(recorded: Sequence[tuple[Any, ...]], injected: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the records; cuts that no fault of kind ``stream`` explains count as the partitions that they are."""
    spare, keys = Counter(recorded) - Counter(injected), list(recorded)
    for partition in (key for key in injected if key[0] == "partition"):
        cut = ("stream", *partition[1:])
        if spare[cut]:
            spare[cut] -= 1
            keys[keys.index(cut)] = partition
    return keys


def _key(fault: Json) -> tuple[Any, ...]:
    # A killed server is recorded by the process that goes on, in the round that this begins with.
    if fault["kind"] == "server":
        return ("server",)
    return fault["kind"], fault["round"], fault["cluster"], fault.get("device")


def report(folder: Path, num_rounds: int) -> Json:
    """Everything that the soak says."""
    soaked, quiet = folder / "faults", folder / "quiet"
    starts = {name: lines_of(folder / name / "starts.jsonl") for name in ("faults", "quiet", "restarts")}
    injected, recorded = injected_in(soaked / "run"), recorded_in(soaked / "run")
    began = [entry["time"] for entry in starts["faults"] if entry.get("resumed")]
    went_on = list(zip((fault["round"] - 1 for fault in recorded if fault["kind"] == "server"), began, strict=False))
    counts = count(injected, recorded, went_on)
    rounds = {name: lines_of(folder / name / "run" / "rounds.jsonl") for name in ("faults", "quiet")}
    metrics = {name: json.loads((folder / name / "run" / "summary.json").read_text())["metrics"] for name in rounds}
    metric = next((name for name in ("bleu", "f1", "accuracy") if name in metrics["quiet"]), "loss")
    # Of what is a share of 1 a point is a hundredth.
    scale = 1.0 if metric in ("bleu", "loss") else 100.0
    points = {name: scale * values[metric] for name, values in metrics.items()}
    ends = [entry for entries in starts.values() for entry in entries if entry["event"] == "end"]
    memory = [row for run in (soaked, quiet) for row in memory_of(run)]
    longest = {name: max(lines, key=lambda line: line["round_s"]) for name, lines in rounds.items()}
    summary = {
        "rounds": num_rounds,
        "rounds_finished": len(rounds["faults"]),
        "starts": sum(entry["event"] == "start" for entry in starts["faults"]),
        "faults_injected": sum(entry["injected"] for entry in counts.values()),
        "longest_round_s": longest["faults"]["round_s"],
        "longest_round": longest["faults"]["round"],
        "longest_round_without_faults_s": longest["quiet"]["round_s"],
        "median_round_s": statistics.median(line["round_s"] for line in rounds["faults"]),
        "median_round_without_faults_s": statistics.median(line["round_s"] for line in rounds["quiet"]),
        "rounds_lost_by_clusters": sum(len(line["failed"]) for line in rounds["faults"]),
        "hangs": sum(entry["why"] == "hang" for entry in ends),
        "processes_left": sum(len(entry["processes"]) for entry in ends),
        # What a killed server leaves behind the next one removes.
        "files_left": sum(len(entry["files"]) for entry in ends if entry["why"] != "server killed"),
        f"{metric}_with_faults": points["faults"],
        f"{metric}_without_faults": points["quiet"],
        "difference_points": points["faults"] - points["quiet"],
    }
    found = {"summary": summary, "metrics": metrics, "counts": counts, "memory": memory}
    found["recovery"] = recovery(folder, injected, recorded)
    found["left"] = [{"processes": entry["processes"], "files": entry["files"][:20]} for entry in ends]
    found["problems"] = list(problems(found, ends, num_rounds))
    return found


def memory_of(run: Path) -> list[Json]:
    """Median memory and processes around a start's tenth round, and over its last tenth of rounds."""
    starts = [entry for entry in lines_of(run / "starts.jsonl") if entry["event"] == "start"]
    samples, rows = lines_of(run / "samples.jsonl"), []
    for n, start in enumerate(starts):
        until = starts[n + 1]["time"] if n + 1 < len(starts) else float("inf")
        # Not before the first round, when processes start.
        own = [s for s in samples if start["time"] <= s["time"] < until and s["round"] > start["round"]]
        if not own:
            continue
        first, last = own[0]["round"], own[-1]["round"]
        # The last samples may be of the end, or of the scoring of the test set.
        own = [s for s in own if s["round"] < last] or own
        tenth = min(start["round"] + 10, (first + last) // 2)
        early = [s for s in own if tenth <= s["round"] < tenth + 10] or own[:1]
        late = [s for s in own if s["round"] >= last - max((last - first) // 10, 1)] or own[-1:]
        median = {
            f"{name}_{when}": statistics.median(s[key] for s in part)
            for when, part in (("early", early), ("end", late))
            for name, key in (("processes", "processes"), ("uss", "uss"))
        }
        rows.append(
            {
                "run": run.name,
                "start": n + 1,
                "rounds": f"{start['round'] + 1}-{last}",
                "num_rounds": last - start["round"],
                "processes_early": int(median["processes_early"]),
                "mb_early": round(median["uss_early"] / 1e6, 1),
                "processes_end": int(median["processes_end"]),
                "mb_end": round(median["uss_end"] / 1e6, 1),
                "growth": round(median["uss_end"] / median["uss_early"] - 1, 4),
            }
        )
    return rows


def recovery(folder: Path, injected: Sequence[Json], recorded: Sequence[Json]) -> list[Json]:
    """Seconds from a fault to the next finished micro-batch of its cluster, and to the next finished round."""
    arrivals = lines_of(folder / "faults" / "arrivals.jsonl")
    lines = {line["round"]: line for line in lines_of(folder / "faults" / "run" / "rounds.jsonl")}
    rows = []
    for kind in ("device", "freeze", "stream", "cluster"):
        # A stream that was cut is recorded as such, however long it stayed so.
        kinds = ("stream", "partition") if kind == "stream" else (kind,)
        events = [event for event in injected if event["kind"] in kinds]
        if kind == "cluster":
            # The record of the round that was lost cannot know it: the control unit that takes over says it.
            records = [fault for fault in recorded if fault["kind"] == "joined" and fault["device"] is None]
        else:
            records = [fault for fault in recorded if fault["kind"] == kind]
        batches = [fault["seconds"] for fault in records if fault["seconds"] is not None]
        ends = [_next_round(event, arrivals, lines) for event in events]
        rows.append(_row(f"{kind} (goes on by itself)", batches, [end for end in ends if end is not None]))
    server = [event for event in injected if event["kind"] == "server"]
    ends = [_next_round(event, arrivals, lines) for event in server]
    rows.append(_row("server (--resume)", [], [end for end in ends if end is not None]))
    arrivals = lines_of(folder / "restarts" / "arrivals.jsonl")
    for kind in ("device", "server"):
        kills = [kill for kill in lines_of(folder / "restarts" / "kills.jsonl") if kill["kind"] == kind]
        ends = [_next_round(kill, arrivals, {}) for kill in kills]
        row = _row(f"{kind} that ends the run (--resume)", [], [end for end in ends if end is not None])
        rows += [row] if kills else []
    return rows


def _next_round(event: Json, arrivals: Sequence[Json], lines: dict[int, Json]) -> float | None:
    """Seconds from a fault to the next finished round, of which its cluster was a part."""
    for arrival in arrivals:
        trained = [report["cluster"] for report in lines.get(arrival["round"], {}).get("clusters", ())]
        if arrival["time"] > event["time"] and (event.get("cluster") is None or event["cluster"] in trained):
            return float(arrival["time"] - event["time"])
    return None


def _row(fault: str, batches: Sequence[float], ends: Sequence[float]) -> Json:
    def three(values: Sequence[float]) -> Json:
        median, most = (statistics.median(values), max(values)) if values else (None, None)
        return {"times": len(values), "median": median, "max": most}

    return {"fault": fault, "micro_batch_s": three(batches), "round_s": three(ends)}


def problems(found: Json, ends: Sequence[Json], num_rounds: int) -> Iterable[str]:
    """Return what is wrong."""
    summary = found["summary"]
    if summary["rounds_finished"] != num_rounds:
        yield f"{summary['rounds_finished']} of {num_rounds} rounds finished"
    for kind, entry in found["counts"].items():
        if kind in INJECTED_KINDS and (entry["missed"] or entry["not_injected"]):
            yield f"{kind}: {entry['missed']} missed, {entry['not_injected']} not injected: {entry['which'][:10]}"
    for name in ("hangs", "processes_left", "files_left"):
        if summary[name]:
            yield f"{name.replace('_', ' ')}: {summary[name]}"
    failed = sum(entry["why"] == "failed" for entry in ends)
    asked = sum(row["round_s"]["times"] for row in found["recovery"] if "ends the run" in row["fault"])
    if failed > asked:
        yield f"{failed} starts failed, {asked} were made to"
    for row in found["memory"]:
        if row["num_rounds"] >= 40 and row["growth"] > GROWTH:
            yield f"memory of {row['run']}, start {row['start']}, grew by {100 * row['growth']:.1f} %"
    if abs(summary["difference_points"]) > METRIC_POINTS:
        yield f"the metric differs by {summary['difference_points']:.2f} points"


def passed(found: Json) -> bool:
    """Tell whether nothing is wrong."""
    return not found["problems"]
