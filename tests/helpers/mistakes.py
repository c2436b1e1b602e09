"""A folder with what people's mistakes are about, and ports that are taken."""

import contextlib
import json

from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import write_config, write_summary
from helpers.joining import edge_folder
from helpers.running_programs import free_block, free_port, taken_port
from helpers.saved_runs import SMALL, save_untrained

CLASSES = """
scenario = "two-clusters"
[task]
name = "sequence-classification"
[model]
family = "bert"
[data]
source = "files"
train-source = "train.csv"
validation-source = "valid.csv"
vocab-size = 300
"""


def prepare_folder(folder):
    """Fill a folder: configurations, tables, certificates, two runs."""
    rows = "".join(f"text number {i},{'ab'[i % 2]}\n" for i in range(24))
    files = {
        "broken.toml": "num-rounds = = 5\n",
        "table.toml": "[modl]\nwidth = 32\n",
        "classes.toml": CLASSES,
        "plan.json": json.dumps({"format": "collapipe-plan/1", "clusters": []}),
        "train.csv": "text,label\n" + rows,
        "valid.csv": "text,label\n" + rows,
        "test.csv": "text,label\n" + rows,
        "ragged.csv": "text,label\none,a\ntwo\n",
        "empty.csv": "text,label\n",
        "few.csv": "text,label\none,a\ntwo,b\nthree,a\nfour,b\n",
        "in.csv": "text\nthe dog sleeps\n",
        "wrong.csv": "id,phrase\n1,the dog sleeps\n",
        "gap.csv": "id,text\n1,the dog sleeps\n2,\n",
        "a.txt": "one\ntwo\n",
        "b.txt": "eins\n",
        "none.txt": "",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "flwr-home").mkdir()
    connections = '[superlink.lab]\naddress = "127.0.0.1:9093"\n[superlink.incomplete]\ninsecure = true\n'
    (folder / "flwr-home" / "config.toml").write_text(connections)
    edge_folder(folder / "certs")
    classes = {"task.name": "sequence-classification", "model.family": "bert"}
    for name, keys in (("saved", SMALL), ("classes", SMALL | classes)):
        run_dir = folder / "runs" / name
        run_dir.mkdir(parents=True)
        write_config(run_dir, RunConfig.from_flat(keys | {"num-rounds": 2}))
        save_untrained(run_dir)
        write_summary(run_dir, "finished", rounds=2)


@contextlib.contextmanager
def ports():
    """Yield a port that is taken, and ports that are free, by name."""
    with taken_port() as taken:
        yield {"taken": taken, "free": free_port(), "block": free_block()}
