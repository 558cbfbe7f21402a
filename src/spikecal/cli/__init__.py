"""The command line. Torch is imported by the commands that need it, so that `--help` answers at once.

Tables go to stdout, messages and progress to stderr; with `--json`, stdout is one JSON document.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import blamed_on, check_writable, make_folder, numbers, shape
from .failures import CommandGroup
from .output import say, show, show_json

if TYPE_CHECKING:
    from ..data import ImageData
    from ..network import SpikingNetwork
    from ..recipes import Recipe

EXIT_CODES = """\b
Exit codes:
  0    success
  1    unexpected failure
  2    wrong usage: an option or argument is missing or malformed
  3    unsupported model, or one that cannot be found or built
  4    data or calibration problem
  5    checkpoint problem: a .spk or weights file cannot be read or does not fit
  130  interrupted
"""

FEW = 32  # calibration images

app = typer.Typer(
    name="spikecal",
    cls=CommandGroup,
    epilog=EXIT_CODES,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:factory (the current folder is importable), torchvision:NAME, timm:NAME, "
        "pytorchcv:NAME, or a .pt2, .onnx or .spk file.",
        show_default=False,
    ),
]
Network = Annotated[Path, typer.Argument(metavar="NET", help="A .spk file, made by convert.", show_default=False)]
Networks = Annotated[
    list[Path], typer.Argument(metavar="NET...", help="Several .spk files, made by convert.", show_default=False)
]
Weights = Annotated[
    Path | None, typer.Option(help="Weights for the model: .safetensors, or a .pth that holds only tensors.")
]
Data = Annotated[
    str,
    typer.Option(
        help="A folder of class folders, a .zip of one, an .npz with x and y, or the named set digits.",
        show_default=False,
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        help="A part of the data: a folder inside, or train or test. By default convert takes train and the others "
        "test, of a named set and of an .npz that has them."
    ),
]
Size = Annotated[int | None, typer.Option(help="Resize images to this short side.")]
Crop = Annotated[int | None, typer.Option(help="Then cut out a centred square of this side.")]
Mean = Annotated[str | None, typer.Option(help="Subtract this from each channel, e.g. 0.49,0.48,0.45.")]
Std = Annotated[str | None, typer.Option(help="Then divide each channel by this, e.g. 0.25,0.24,0.26.")]
Seed = Annotated[int, typer.Option(help="Decides which images are drawn.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many images, drawn at random.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
PoolToConv = Annotated[
    bool, typer.Option("--pool-to-conv", help="Give average pools neurons of their own: all spikes are binary.")
]


def main() -> None:
    """The console script. A terminal that cannot show a character gets a question mark, not a crash."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Turn trained PyTorch networks into calibrated spiking networks, without retraining.

    \b
    Example:
      spikecal demo
    """


@app.command()
def inspect(
    model: Model,
    weights: Weights = None,
    input: Annotated[
        list[str] | None,
        typer.Option(
            metavar="C,H,W",
            help="Shape of one image; a model of torchvision, timm or pytorchcv has one of its own. "
            "Repeat it for a model with several inputs.",
        ),
    ] = None,
    pool_to_conv: PoolToConv = False,
    json: Json = False,
) -> None:
    """Show the network that would be converted, and the rule chosen for every node; or what of it is refused, and why.

    \b
    Example:
      spikecal inspect spikecal.models:digits_net --input 1,8,8
    """
    shapes = [shape("--input", text) for text in input or ()]
    from ..capture import objection
    from ..errors import UnsupportedModelError
    from .description import calibration_of, describe, refused_unseen
    from .factories import usual_shape
    from .model import find_model, surveyed
    from .tables import network_table

    try:
        found = find_model(model, weights)
        if shapes and model.endswith(".spk"):
            raise typer.BadParameter("a .spk file knows the shape of its images", param_hint="--input")
        if not shapes and (usual := usual_shape(model, found)) is not None:
            shapes = [usual]
            say(f"images of {'×'.join(map(str, usual))}; --input takes another shape")
        graph, refusals = surveyed(found, shapes)
    except UnsupportedModelError as e:
        if json:
            show_json({"model": model, **refused_unseen(e)})
        raise
    description, error = describe(graph, refusals, pool_to_conv=pool_to_conv), objection(graph, refusals)
    calibrated = calibration_of(found, pool_to_conv)
    if json:
        show_json({"model": model, **calibrated, **description.to_dict(), "message": str(error) if error else None})
    else:
        show(*network_table(model, calibrated, description))
    if error is not None:
        raise error


@app.command()
def convert(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option("-o", "--output", help="The .spk file to write.", show_default=False)],
    weights: Weights = None,
    T: Annotated[int | None, typer.Option("-T", min=1, help="Time steps; 32 by default.", show_default=False)] = None,
    auto_T: Annotated[
        float | None,
        typer.Option(
            "--auto-T",
            min=0,
            max=100,
            metavar="POINTS",
            help="Find the smallest T, up to 128, that agrees with the ANN within this many percentage points of the "
            "largest.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="plain, light, advanced, best, pipelined, max_activation, percentile or opt; or a .json file. "
            "Default: best, or a .spk file's own."
        ),
    ] = None,
    pool_to_conv: PoolToConv = False,
    images: Annotated[
        int | None, typer.Option(min=1, help="Calibrate with this many images, not what the recipe says.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="The most memory to use, e.g. 2GiB; by default half of what is free.")
    ] = None,
    seed: Seed = 0,
    split: Split = None,
    size: Size = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    json: Json = False,
) -> None:
    """Convert a trained network into a spiking one, and write it to a file.

    The images need no labels. Of a named set, and of an .npz with x_train, the train split is used unless another is
    asked for.

    \b
    Example:
      spikecal convert spikecal.models:digits_net --data digits -T 8 -o digits.spk
      spikecal convert spikecal.models:digits_net --data digits --auto-T 1.0 -o digits.spk
    """
    if T is not None and auto_T is not None:
        raise typer.BadParameter("give either -T or --auto-T, not both")
    check_writable(output, ".spk")
    pixels = _preprocessing(size, crop, mean, std)
    from ..conversion import MODEL_FILES, convert as convert_model
    from ..data import load_data
    from ..memory import budget
    from ..time_steps import HELD_OUT, find_T
    from .description import conversion_summary
    from .factories import ZOOS
    from .model import find_model
    from .tables import conversion_tables

    with blamed_on("--memory"):
        budget(memory)  # a wrong one is reported before the long work
    found = find_model(model, weights)
    if weights is None and not model.endswith(MODEL_FILES):
        kept = "has random ones" if model.split(":")[0] in ZOOS else "keeps those it is built with, perhaps random ones"
        say(f"no --weights given: {model} {kept}")
    with blamed_on("--recipe"):
        chosen = _recipe(recipe, found, pool_to_conv, images)
    pixels = pixels or _stored_preprocessing(found)
    wanted = max(chosen.threshold_images, chosen.calibration_images)
    if auto_T is not None:
        wanted = wanted * HELD_OUT // (HELD_OUT - 1)
    split = split or _default_split(data, "train")
    loaded = load_data(data, split=split, limit=wanted, seed=seed, **pixels)
    if images and len(loaded) < images:
        say(f"there are only {len(loaded)} images")
    if len(loaded) < FEW:
        say(f"{len(loaded)} images are few: thresholds and corrections are better with a hundred or more")
    steps = "the smallest T that is enough" if auto_T is not None else f"T = {T or 32}"
    held_out = ", a quarter of them held out" if auto_T is not None else ""
    say(f"converting {model} for {steps} with recipe {chosen.name} and {len(loaded)} images{held_out}")
    start = perf_counter()
    options: dict[str, Any] = {"memory": memory, "seed": seed, "progress": sys.stderr.isatty()}
    search = None
    if auto_T is not None:
        search = find_T(found, loaded.batches(), auto_T, chosen, **options)
        snn = search.snn
        if 100 / search.held_out > auto_T:
            say(f"{search.held_out} held-out images cannot tell {auto_T:g} points apart; give more images")
    else:
        snn = convert_model(found, loaded.batches(), T or 32, chosen, **options)
    snn.preprocessing = pixels
    snn.save(output)
    summary = conversion_summary(snn, str(output), len(loaded), perf_counter() - start, search)
    if json:
        show_json({"model": model, "data": data, "split": split, **summary})
    else:
        show(*conversion_tables(summary))


@app.command()
def evaluate(
    network: Network,
    data: Data,
    split: Split = None,
    size: Size = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    limit: Limit = None,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the numbers as JSON.")] = None,
    json: Json = False,
) -> None:
    """Measure a spiking network beside the ANN it comes from: its accuracy, or without labels how often they agree.

    Of a named set, and of an .npz with x_test, the test split is used unless another is asked for. The images are
    preprocessed as those that the network was converted with, unless --size, --crop, --mean or --std say otherwise.

    \b
    Example:
      spikecal evaluate digits.spk --data digits --split test
    """
    if output is not None:
        check_writable(output, ".json")
    pixels = _preprocessing(size, crop, mean, std)
    from ..evaluation import evaluate as evaluate_network
    from ..files import write_json
    from .tables import evaluation_tables

    split = split or _default_split(data, "test")
    snn, loaded = _network_and_data(network, data, split, limit, seed, pixels)
    result = evaluate_network(snn, loaded.batches(), progress=sys.stderr.isatty())
    found = {"network": str(network), "data": data, "split": split, **result.to_dict()}
    if output is not None:
        write_json(output, found)
        say(f"wrote {output}")
    if json:
        show_json(found)
    else:
        show(*evaluation_tables(result))


@app.command()
def report(
    network: Network,
    data: Data,
    split: Split = None,
    size: Size = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    limit: Limit = None,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Evaluate a spiking network and write what was found as one HTML file, to be opened in any browser.

    It shows accuracy over time, the error of every layer and its parts, firing rates, spikes and energy.

    \b
    Example:
      spikecal report digits.spk --data digits --split test -o report.html
    """
    check_writable(output, ".html")
    pixels = _preprocessing(size, crop, mean, std)
    from ..report import write_report

    split = split or _default_split(data, "test")
    snn, loaded = _network_and_data(network, data, split, limit, seed, pixels)
    options: dict[str, Any] = {"command": _command(), "progress": sys.stderr.isatty()}
    options["classes"] = loaded.classes
    write_report(snn, loaded.batches(), output, title=f"{network.name} on {data}", **options)
    say(f"wrote {output}")


@app.command()
def compare(
    networks: Networks,
    data: Data,
    split: Split = None,
    size: Size = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    limit: Limit = None,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write an HTML page with the curves.")] = None,
    json: Json = False,
) -> None:
    """Evaluate several spiking networks on the same images: accuracy against time, work and energy.

    \b
    Example:
      spikecal compare light.spk best.spk --data digits --split test -o comparison.html
    """
    if output is not None:
        check_writable(output, ".html")
    pixels = _preprocessing(size, crop, mean, std)
    from ..evaluation import evaluate as evaluate_network
    from ..judgement import comparison_verdict
    from .tables import comparison_table

    if len(set(networks)) < len(networks):
        raise typer.BadParameter("each network must be given once", param_hint="NET")
    split = split or _default_split(data, "test")
    results = {}
    for path in networks:
        snn, loaded = _network_and_data(path, data, split, limit, seed, pixels)
        results[str(path)] = evaluate_network(snn, loaded.batches(), progress=sys.stderr.isatty())
    if output is not None:
        from ..report import write_comparison

        write_comparison(results, output, title=f"{len(results)} networks on {data}", command=_command())
        say(f"wrote {output}")
    if json:
        show_json({name: result.to_dict() for name, result in results.items()})
    else:
        show(comparison_table(results), comparison_verdict(results))


@app.command()
def bench(
    network: Network,
    data: Data,
    split: Split = None,
    size: Size = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    batch: Annotated[list[int], typer.Option(min=1, help="Images at a time; may be given more than once.")] = [1, 32],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="How often each is timed; the best counts.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the ANN and of all engines.")] = 1,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Time a spiking network on every engine, beside T passes of its ANN on the same images.

    \b
    Example:
      spikecal bench digits.spk --data digits --batch 1 --batch 32
    """
    pixels = _preprocessing(size, crop, mean, std)
    from dataclasses import asdict

    from ..bench import bench as time_network
    from .tables import bench_tables

    split = split or _default_split(data, "test")
    snn, loaded = _network_and_data(network, data, split, max(batch), seed, pixels)
    result = time_network(snn, loaded.x, batch, rounds=rounds, threads=threads)
    if json:
        show_json({"network": str(network), "data": data, "split": split, **asdict(result)})
    else:
        show(*bench_tables(result))


def _command() -> str:
    return shlex.join(["spikecal", *sys.argv[1:]])


def _network_and_data(
    network: Path, data: str, split: str | None, limit: int | None, seed: int, pixels: dict[str, Any]
) -> tuple[SpikingNetwork, ImageData]:
    """A spiking network, and images preprocessed as those it was converted with, unless `pixels` says otherwise."""
    from ..checkpoint import load
    from ..data import load_data

    snn = load(network)
    loaded = load_data(data, split=split, limit=limit, seed=seed, **(pixels or _stored_preprocessing(snn)))
    if loaded.classes and (len(loaded.classes),) != snn.graph.outputs[0].shape:
        outputs = "×".join(map(str, snn.graph.outputs[0].shape))
        say(f"the data has {len(loaded.classes)} class folders, the network {outputs} outputs: labels are the ranks of")
        say("the sorted folder names, so a missing class shifts those behind it")
    return snn, loaded


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the results.")] = Path("spikecal-demo"),
    json: Json = False,
) -> None:
    """Convert a small trained network with six recipes and five numbers of time steps. Takes about a minute.

    \b
    Example:
      spikecal demo -o spikecal-demo
    """
    make_folder(output)
    from ..demo import run_demo
    from .tables import demo_tables

    result = run_demo(output, progress=sys.stderr.isatty())
    if json:
        show_json(result.to_dict())
    else:
        show(*demo_tables(result))


def _preprocessing(size: int | None, crop: int | None, mean: str | None, std: str | None) -> dict[str, Any]:
    """What the options ask for, nothing else."""
    options = {"size": size, "crop": crop, "mean": numbers("--mean", mean), "std": numbers("--std", std)}
    return {name: value for name, value in options.items() if value is not None}


def _stored_preprocessing(model: object) -> dict[str, Any]:
    """What the images of a spiking network's conversion went through; nothing for another model."""
    stored: dict[str, Any] = getattr(model, "preprocessing", {})
    if stored:
        say("preprocessing as in its conversion: " + ", ".join(f"{name} {value}" for name, value in stored.items()))
    return stored


def _recipe(name: str | None, model: object, pool_to_conv: bool, images: int | None) -> Recipe:
    """A recipe by name, from a file or the model's own, with what the command line changes in it."""
    from dataclasses import replace

    from ..errors import CalibrationError
    from ..network import SpikingNetwork
    from ..recipes import DEFAULT, Recipe, find_recipe

    if name is None:
        recipe = model.recipe if isinstance(model, SpikingNetwork) else find_recipe(DEFAULT)
    elif name.endswith(".json"):
        try:
            recipe = Recipe.from_json(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else e
            raise CalibrationError(f"cannot read the recipe {name}: {why}") from e
        except CalibrationError as e:
            raise CalibrationError(f"{name}: {e}") from e
    else:
        recipe = find_recipe(name)
    if pool_to_conv:
        recipe = replace(recipe, pool_to_conv=True)
    return recipe if images is None else replace(recipe, threshold_images=images, calibration_images=images)


def _default_split(data: str, purpose: str) -> str | None:
    """What is split for a purpose is used so, that nobody measures on the images they calibrated with."""
    from ..data import NAMED_SETS, array_names

    if data in NAMED_SETS:
        return purpose
    return purpose if data.endswith(".npz") and f"x_{purpose}" in array_names(Path(data)) else None
