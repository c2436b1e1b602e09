"""The command line: ``collapipe run | evaluate | predict | export | plan | compare | report | verify | ...``.

Exit codes: 0 done, 1 failed or a check not met, 2 bad input, 3 infeasible, 130 interrupted. With ``--json`` standard
output holds one object and nothing else; all text for people goes to standard error. A mistake in the input is one
line; with ``COLLAPIPE_TRACEBACK=1`` in the environment its traceback comes first.
"""

# Heavy imports stay inside the commands: --help answers at once.

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from flower_app.cli import (
    deployment_commands,
    evaluate_and_predict,
    first_commands,
    joining_commands,
    planning_commands,
    serve_command,
    watch_command,
)
from flower_app.cli.mistakes import mistakes_as_lines
from flower_app.cli.options import AllowedModules, Config, Json, Run, Sets
from flower_app.config.removed import refuse_removed
from flower_app.console import print_json, say


class _Commands(TyperGroup):
    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; a mistake of the user is one line, without a traceback."""
        with mistakes_as_lines():
            return super().invoke(ctx)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Refuse what an earlier release had by its name, before the parser finds it unknown."""
        refuse_removed(args)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _show_version(asked: bool) -> None:
    """Print the release and what it runs on, and end."""
    if asked:
        from importlib.metadata import version
        from platform import python_version

        typer.echo(f"collapipe {version('collapipe')} (Python {python_version()}, flwr {version('flwr')})")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the release and exit.")
    ] = False,
) -> None:
    """Train a Transformer cut into segments over clusters of weak devices, joined by federated averaging."""


@app.command("run")
def run_command(
    config: Config = None,
    sets: Sets = None,
    resume: Annotated[str, typer.Option(metavar="RUN", help="Go on with a run from its last checkpoint.")] = "",
    superlink: Annotated[
        str, typer.Option(help="HOST, HOST:PORT, or a name of Flower's configuration: run on real machines.")
    ] = "",
    certs: Annotated[Path, typer.Option(help="With --superlink: the edge server's folder of certificates.")] = Path(
        "certs/server"
    ),
    control_port: Annotated[int, typer.Option(help="With --superlink: that of collapipe up edge-server.")] = 0,
    after_training: Annotated[
        bool, typer.Option("--after-training", help="With --superlink: boxes with a door answer then (serve.when).")
    ] = False,
    allow_module: AllowedModules = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve the page of collapipe watch meanwhile.")] = False,
    watch_port: Annotated[int, typer.Option(help="With --watch: on 127.0.0.1; 0: any that is free.")] = 8090,
    as_json: Json = False,
) -> None:
    """Train: the Flower app in simulation, with all clusters at once. Without options: the default run."""
    from flower_app.launch.single_run import continued_run, launch_run, new_run

    if allow_module and not resume:
        raise ValueError("--allow-module: expected with --resume RUN; a configuration of your own names what it likes")
    if resume and config:
        raise ValueError("--resume: a run goes on as it began; leave out --config")
    if after_training and (resume or not superlink):
        raise ValueError(
            "--after-training: expected with --superlink and without --resume; collapipe serve RUN --superlink ADDRESS "
            "gives a finished run's model to the boxes"
        )
    deployment, overrides = None, list(sets or ())
    if after_training:
        overrides.append("serve.when=after-training")
    if superlink:
        from flower_app.deployment.deployed_run import Deployment

        deployment = Deployment.of(superlink, certs, control_port)
        overrides += [] if resume else deployment.settings(config, overrides)
    with watch_command.run_page(watch_port) if watch else nullcontext() as page:
        if resume:
            run = continued_run(resume, overrides, allow_module or ())
        else:
            run = new_run(config, overrides, say, simulated=not superlink)
        with page.of(run.run_dir, run.config) if page else nullcontext():
            outcome = launch_run(run, say, deployment)
    if as_json:
        print_json({"run_dir": str(run.run_dir), "status": outcome.status, "error": outcome.error} | outcome.summary)
    raise typer.Exit(outcome.exit_code)


evaluate_and_predict.register(app)


@app.command()
def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Adapters alone, for PeftModel.from_pretrained.")] = False,
    base: Annotated[
        str, typer.Option(help="Folder or hub id of the base model, where it is not that of the training.")
    ] = "",
    cluster: Annotated[
        int | None,
        typer.Option(help="Whose model, where each cluster has its own (local, pipeline); 0 unless you say."),
    ] = None,
    push_to: Annotated[str, typer.Option(metavar="ID", help="Upload the folder to the hub, too.")] = "",
    as_json: Json = False,
) -> None:
    """Write the model of a run for the transformers library: AutoModelFor... and AutoTokenizer load the folder."""
    from flower_app.export import check_push, export_run, push_folder
    from flower_app.runs.run_directory import find_run

    run_dir = find_run(run)
    if push_to:
        check_push(run_dir, push_to, base)
    exported = export_run(run_dir, folder, adapter=adapter, base=base, cluster=cluster)
    say(f"{exported.model_class}: {', '.join(exported.files)}")
    if exported.rounding:
        say(exported.rounding)
    if push_to:
        say(f"pushed to {push_folder(folder, push_to)}")
    if as_json:
        print_json({"folder": str(exported.folder), "model_class": exported.model_class, "files": exported.files})
    else:
        typer.echo(exported.folder)


@app.command("verify")
def verify_command(
    model: Annotated[str, typer.Option(help="Folder or hub id; empty: the default run's Transformer.")] = "",
    plan_file: Annotated[Path | None, typer.Option("--plan", help="A plan file; its first cluster counts.")] = None,
    segments: Annotated[str, typer.Option(help="TEBs of each segment, such as 2,1,3; empty: even.")] = "",
    micro_batches: Annotated[int, typer.Option(help="m.")] = 8,
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b or zb-h1.")] = "gpipe",
    token_slices: Annotated[int, typer.Option(help="Of causal models, without dropout then.")] = 1,
    batch_size: Annotated[int, typer.Option(help="b.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of the random sequences.")] = 32,
    seed: Annotated[int, typer.Option(help="Of weights, batch and dropout.")] = 0,
    base_dtype: Annotated[
        str, typer.Option(help="With adapters, over matrices in float32, bfloat16, int8 or nf4; empty: without.")
    ] = "",
    server_layers: Annotated[int, typer.Option(help="Last layers of a decoder-only model, on the server.")] = 0,
    labels: Annotated[str, typer.Option(help="server; or cluster: they stay there, as with split.labels.")] = "server",
    as_json: Json = False,
) -> None:
    """Compare the segmented model on real actors with the whole model in one process; exit 1 if they differ."""
    options = {name: value for name, value in locals().items() if name != "as_json"}
    from client_pipeline.runtime.ray.private_ray import prepare_private_ray

    try:
        sizes = tuple(int(part) for part in segments.split(",")) if segments else ()
    except ValueError:
        raise ValueError(f"--segments: expected whole numbers with commas, such as 2,1,3; found {segments!r}") from None
    prepare_private_ray()
    from client_pipeline.runtime.control_unit.verification import SPLIT_TOLERANCE
    from flower_app.verify import verify as compare

    # Ray prints the worker that died there.
    with redirect_stdout(sys.stderr):
        checked = compare(**options | {"segments": sizes})
    differences = {"output": checked.output, "loss": checked.loss}
    if checked.reference is not None:
        differences["library model"] = checked.reference
    if as_json:
        gradients = {"gradients": checked.gradients, "worst": checked.worst, "passed": checked.passed}
        print_json(differences | gradients)
    else:
        rows = {**differences, **{f"gradient {name}": value for name, value in checked.gradients.items()}}
        width = max(map(len, rows))
        typer.echo("\n".join(f"{name:<{width}}  {value:.1e}" for name, value in rows.items()))
        typer.echo(
            f"{'passed' if checked.passed else 'FAILED'}: largest {checked.worst:.1e}, allowed {SPLIT_TOLERANCE:.0e}"
        )
    raise typer.Exit(0 if checked.passed else 1)


@app.command("import-gguf")
def import_gguf_command(
    file: Annotated[Path, typer.Argument(help="A causal language model, quantised or not.")],
    folder: Annotated[Path, typer.Argument(help="Where to; it must not exist, or be empty.")],
) -> None:
    """Write a model in a GGUF file as a folder for model.pretrained."""
    from flower_app.gguf_import import import_gguf

    imported = import_gguf(file, folder)
    say(f"{imported.model_type}, {imported.num_parameters:,} parameters: {', '.join(imported.files)}")
    typer.echo(imported.folder)


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories, names in runs, or latest.")],
    out: Annotated[Path | None, typer.Option(help="The file; otherwise report.html in the run, or here.")] = None,
) -> None:
    """Draw a run, or several beside each other, into one HTML file."""
    from flower_app.report.page import write_report
    from flower_app.runs.run_directory import find_run

    typer.echo(write_report([find_run(run) for run in runs], out))


@app.command()
def leakage(
    run: Run = "latest",
    noise: Annotated[str, typer.Option(help="Noise multipliers, with commas.")] = "0,0.1,0.3,1",
    clip: Annotated[float, typer.Option(help="Largest norm of an activation; 0: the run's, or the median.")] = 0.0,
    tokens: Annotated[int, typer.Option(help="Most tokens to learn the attack from, and to read.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of noise and attacks.")] = 0,
    cut_only: Annotated[
        bool, typer.Option("--cut-only", help="Attack what the server is sent, no other depth.")
    ] = False,
    choose: Annotated[
        bool, typer.Option("--choose", help="Find the setting of least cost that no attack reads beyond a share.")
    ] = False,
    max_readable: Annotated[float, typer.Option(help="That share; 0: the run's privacy.max-readable.")] = 0.0,
    codecs: Annotated[str, typer.Option(help="Ways to send activations that are tried, with commas.")] = "none,int8",
    allow_module: AllowedModules = None,
    as_json: Json = False,
) -> None:
    """Attack your own run: how many tokens are read from its activations by depth and noise, and what noise costs."""
    from client_pipeline.link.activation_codec import ActivationCodec
    from flower_app.leakage.measurement import LeakageRequest, leakage_table, measure_leakage
    from flower_app.plain_console import PlainConsole

    try:
        levels = tuple(float(part) for part in noise.split(","))
    except ValueError:
        raise ValueError(f"--noise: expected numbers with commas, such as 0,0.1; found {noise!r}") from None
    request = LeakageRequest(noise=levels, clip=clip, most_tokens=tokens, seed=seed, cut_only=cut_only)
    if choose:
        from flower_app.leakage.choice import choice_table, choose_setting

        names = [ActivationCodec(name.strip()).name for name in codecs.split(",")]
        choice = choose_setting(run, request, names, max_readable, say, allow_module or ())
        print_json(choice) if as_json else PlainConsole(width=160).print(choice_table(choice))
        return
    leakage = measure_leakage(run, request, say, allow_module or ())
    if as_json:
        print_json(leakage)
    else:
        PlainConsole(width=160).print(leakage_table(leakage))


@app.command("profile")
def profile_command(
    model: Annotated[str, typer.Option(help="Folder or hub id; empty: the default run's Transformer.")] = "",
    length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 32,
    batch_size: Annotated[int, typer.Option(help="b.")] = 16,
    devices: Annotated[int, typer.Option(help="How many devices each Ray node stands for.")] = 2,
    address: Annotated[str, typer.Option(help="HOST:PORT or auto of a Ray cluster; empty: this machine alone.")] = "",
    certs: Annotated[
        Path | None, typer.Option(help="With --address: the folder of a box that has joined, STATE/joined.")
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="What this command printed with --json on a cluster; repeat it: one file of them all."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The scenario to write.")] = Path("measured.toml"),
    as_json: Json = False,
) -> None:
    """Measure devices and the links between them, and write a scenario to plan with."""
    options = {name: value for name, value in locals().items() if name != "as_json"}
    from flower_app.deployment.ray_node import ray_access

    # Ray prints on standard output which worker died.
    with ray_access(address, certs), redirect_stdout(sys.stderr):
        from flower_app.profile import ProfileRequest, profile as measure

        profile = measure(ProfileRequest(**options | {"measured": tuple(measured or ())}), say)
    say(f"scenario: {profile.scenario}; collapipe plan --scenario {profile.scenario} plans with it")
    if as_json:
        print_json(profile.to_dict())


first_commands.register(app)
planning_commands.register(app)
deployment_commands.register(app)
joining_commands.register(app)
watch_command.register(app)
serve_command.register(app)


def main() -> None:
    """Entry point of the console script."""
    app()
