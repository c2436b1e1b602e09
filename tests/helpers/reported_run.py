"""A run directory with all that a report shows, and the report's page as a reader of HTML has it."""

import json
from html.parser import HTMLParser

EVENTS = [["F", 0, 0, 0.0, 2.0], ["z", 0, 0, 2.0, 2.5], ["F", 1, 0, 2.5, 3.5], ["B", 1, 0, 3.5, 5.5],
          ["g", 0, 0, 5.5, 6.0], ["B", 0, 0, 6.0, 10.0]]  # fmt: skip


def virtual(number):
    """Cluster 0 is the slower one; cluster 1 is not selected in the third round."""
    trained = {"selected": True, "device_energy_j": [2.0, 0.0, 3.0], "link_bytes": [1e6, 0.0, 2e6],
               "device_memory_bytes": [6e8, 0.0, 9e8], "whole_model_bytes": 4.5e9}  # fmt: skip
    clusters = [
        {"cluster": 0, "train_s": 90.0, "uplink_s": 10.0, "waiting_s": 0.0, "uplink_energy_j": 1.0} | trained,
        {"cluster": 1, "train_s": 50.0, "uplink_s": 30.0, "waiting_s": 20.0, "uplink_energy_j": 1.0} | trained,
    ]
    if number == 3:
        clusters[1] = {"cluster": 1, "selected": False, "train_s": None, "uplink_s": None}
    for cluster in clusters:
        cluster |= {"gamma": 2.4, "queue": 0.1 * number}
    return {"latency_s": 100.0, "latency_eq15_s": 104.0, "energy_j": 12.0, "gamma_max": 2.6, "clusters": clusters}


def record(number, **changes):
    devices = {"2": {"blocks": 2, "busy_s": 0.1, "idle_bytes": 200_000_000, "peak_bytes": 260_000_000}}
    return {
        "round": number,
        "train_loss": 4.0 / number,
        "bytes_down": 1_000_000,
        "bytes_up": 900_000,
        "clusters": [
            {"cluster": 0, "loss": 1.0, "devices": devices, "prepare_s": 0.25, "train_s": 1.5, "collect_s": 0.5}
        ],
        "failed": [],
        "metrics": {"loss": 2.0, "bleu": 10.0 * number} if number % 2 == 0 else {},
        "lr": 0.001,
        "wall_s": 3.0 * number,
        "round_s": 3.0,
        "messages_s": 2.5,
        "faults": [{"kind": "device", "cluster": 0, "device": 2, "recovered": True}] if number == 3 else [],
        "plan": {"policy": "dssda", "status": "optimal", "left_out": []},
        "virtual": virtual(number),
        **changes,
    }


def make_run(folder, records=None, summary="finished", timeline=True, config='name = "demo"\nnum-rounds = 4\n'):
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    records = [record(n) for n in (1, 2, 3, 4)] if records is None else records
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if summary:
        metrics = {"bleu": 41.5} if summary == "finished" else {}
        error = {} if summary == "finished" else {"error": "cluster 1 <b>vanished</b>"}
        (folder / "summary.json").write_text(
            json.dumps({"status": summary, "wall_s": 12.5, "metrics": metrics} | error)
        )
    if timeline:
        clusters = [
            {"cluster": 0, "order": [2, 0], "modelled": EVENTS, "measured": [e for e in EVENTS if e[0] in "FB"]}
        ]
        (folder / "timeline.json").write_text(json.dumps({"round": 4, "clusters": clusters}))
    return folder


class Page(HTMLParser):
    """Ids, addresses, text and well-nestedness of a page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.addresses, self.texts, self.open = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.addresses.append(value)
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "br", "link"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)

    @property
    def text(self):
        return " ".join(self.texts)
