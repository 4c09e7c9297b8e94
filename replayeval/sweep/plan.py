"""Plans: which models, policies, windows, lengths and tasks are measured, read from YAML."""

import difflib
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from replayeval.data.lengths import parse_lengths
from replayeval.errors import ConfigError
from replayeval.report.text import printable

PLAN_SCHEMA = "replayeval.plan/1"
MAX_PLAN_BYTES = 1 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def _one_length(value: Any) -> Any:
    """A number of tokens, written as 8192 or as 8K."""
    if isinstance(value, str):
        found = parse_lengths(value)
        if len(found) != 1:
            raise ValueError(f"expected one number of tokens such as 8K, got {value!r}")
        return found[0]
    return value


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]  # pyright: ignore[reportUnknownVariableType]


def _as_entry(value: Any) -> Any:
    return {"id": value} if isinstance(value, str) else value


def _as_switch(value: Any) -> Any:
    """YAML reads a bare on or off as a truth value."""
    return ("on" if value else "off") if isinstance(value, bool) else value


Tokens = Annotated[int, BeforeValidator(_one_length), Field(ge=1, le=1 << 31, strict=True)]
PromptTokens = Annotated[int, Field(ge=0, le=1 << 31, strict=True)]
Count = Annotated[int, Field(ge=1, le=1 << 31, strict=True)]
Window = Annotated[int, Field(ge=1, le=128, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=1 << 64, strict=True)]
Texts = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=400)], ...], BeforeValidator(_as_list)]
Lengths = Annotated[tuple[Tokens, ...], BeforeValidator(_as_list), Field(min_length=1)]
Windows = Annotated[tuple[Window, ...], BeforeValidator(_as_list), Field(min_length=1)]
Seeds = Annotated[tuple[Seed, ...], BeforeValidator(_as_list), Field(min_length=1)]


class Part(BaseModel):
    """A part of a plan: frozen and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelEntry(Part):
    """A model, and what it needs to run."""

    id: Annotated[str, Field(min_length=1)]
    """Hub id, directory, or `builtin:NAME`."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; it is pinned to a commit when the sweep starts."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")] = "auto"
    """Where it is loaded; `auto` spreads it over all GPUs that the process sees."""
    gpus: Annotated[int, Field(ge=0, le=64, strict=True)] = 0
    """GPUs of one worker under Ray; 0 for the CPU."""
    cpus: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """CPU cores of one worker under Ray."""
    max_length: Tokens | None = None
    """Longest generation length that this model is read to; longer ones are left out."""
    active_parameters: Annotated[float, Field(gt=0)] | None = None
    """Parameters that take part in one token, for the estimate of the cost."""
    published_as: str | None = None
    """Name under which published results list it."""
    trust_remote_code: bool = False
    """Let its tokenizer run code from its repository."""


Models = Annotated[
    tuple[Annotated[ModelEntry, BeforeValidator(_as_entry)], ...], BeforeValidator(_as_list), Field(min_length=1)
]


class Arms(Part):
    """Axes that all grids share."""

    models: Texts | None = None
    """Ids of the models of this grid; all models of the plan where left out."""
    windows: Windows = (16,)
    """Axis: replay windows in tokens, for policies that name none."""
    seeds: Seeds = (0,)
    """Axis: seeds of stochastic rounding and of the bootstrap."""
    precision: Texts = ()
    """Formats that each stand for their five default arms."""
    arms: Texts = ()
    """State policies, all measured together against the reference."""

    @model_validator(mode="after")
    def _some_arm(self) -> "Arms":
        if not self.arms and not self.precision:
            raise ValueError("expected `arms` or `precision`, got neither")
        return self


class KLGrid(Arms):
    """Output KL by generation length: one cell for each model, text, window and seed."""

    kind: Literal["kl"]
    """What is measured."""
    data: Annotated[Texts, Field(min_length=1)] | None = None
    """Axis: sources of text; `builtin` for a built-in model and `pg19` for another where left out."""
    lengths: Lengths | None = None
    """Generation lengths to report, in tokens; K is 1024."""
    docs: Count | None = None
    """Documents of each source."""
    prefill: PromptTokens = 0
    """Tokens at the start of each document that are its prompt."""
    engine: Literal["chunk", "step"] = "chunk"
    """Whole chunks per forward pass, or token by token."""
    chunk: Tokens = 1024
    """Tokens per forward pass."""
    backend: Annotated[str, Field(max_length=40)] = "torch"
    """What advances the states; what `kl --backend` takes."""


class TaskOptions(Part):
    """Arguments of `replayeval.tasks.measure_tasks` that nothing else in a plan decides."""

    samples: Count | None = None
    """Answers per document."""
    gen_kwargs: dict[str, JsonValue] | None = None
    """Replaced generation settings."""
    task_data: dict[str, str] | None = None
    """Local files by short name of the task."""
    chat_template: Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_switch)] = "auto"
    """Whether prompts are chats."""
    context: Literal["prompt", "decoded"] = "prompt"
    """What the context of a likelihood counts as."""
    batch_size: Count | Literal["auto"] = "auto"
    """Rows decoded side by side."""


class TaskGrid(Arms):
    """Accuracy on tasks: one cell for each model, task, window and seed."""

    kind: Literal["tasks"]
    """What is measured."""
    tasks: Annotated[Texts, Field(min_length=1)]
    """Axis: tasks of lm-eval or of this project."""
    limit: Count | None = None
    """Documents of each task; all where left out."""
    shard: Count = 64
    """Documents of one unit."""
    options: TaskOptions = Field(default_factory=lambda: TaskOptions())
    """Further arguments of `replayeval.tasks.measure_tasks`."""


Grid: TypeAlias = Annotated[KLGrid | TaskGrid, Field(discriminator="kind")]


class Plan(Part):
    """A sweep: the grids of cells that it measures."""

    schema_name: Annotated[Literal["replayeval.plan/1"], Field(alias="schema")] = PLAN_SCHEMA
    """Name and version of this schema."""
    name: str
    """Short name, part of the names of its runs."""
    title: str = ""
    """What it shows, in one line."""
    published: Texts = ()
    """Published tables to print beside the results."""
    models: Models
    """The models of all grids."""
    grids: Annotated[tuple[Grid, ...], BeforeValidator(_as_list), Field(min_length=1)]
    """What is measured."""

    @field_validator("name")
    @classmethod
    def _usable_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("expected a name of lower-case letters, digits, '.', '_' and '-'")
        return name

    @model_validator(mode="after")
    def _references_resolve(self) -> "Plan":
        ids = [model.id for model in self.models]
        twice = sorted({x for x in ids if ids.count(x) > 1})
        if twice:
            raise ValueError(f"expected different models, got {', '.join(twice)} more than once")
        for number, grid in enumerate(self.grids):
            unknown = [x for x in grid.models or () if x not in ids]
            if unknown:
                raise ValueError(f"grids[{number}].models: expected ids out of {', '.join(ids)}, got {unknown[0]!r}")
        return self

    def entries(self, grid: KLGrid | TaskGrid) -> tuple[ModelEntry, ...]:
        """Return the models of a grid."""
        return tuple(m for m in self.models if grid.models is None or m.id in grid.models)


def load_plan(source: str | Path) -> Plan:
    """Read a plan from a file, or a shipped one by its name.

    Raises:
        ConfigError: There is no such plan, it is no YAML, or it does not fit; all offences are named at once.
    """
    path = find_plan(source)
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise ConfigError(f"{path}: expected a plan of at most 1 MiB, got {path.stat().st_size} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the plan {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; expected a plan in YAML") from error
    return parse_plan(text, where=printable(str(path)))


def parse_plan(text: str, *, where: str = "the plan") -> Plan:
    """Return the plan that a YAML text holds.

    Args:
        text: The YAML.
        where: How messages call it.

    Raises:
        ConfigError: As `load_plan`.
    """
    try:
        values: object = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a subclass of the safe loader
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where} is not YAML: {printable(' '.join(str(error).split()))}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a plan with the keys name, models and grids, got {_kind(values)}")
    try:
        return Plan.model_validate(values)
    except ValidationError as error:
        problems = [_problem(entry) for entry in error.errors(include_url=False)]
        listed = "\n  - ".join(dict.fromkeys(problems))
        raise ConfigError(f"{where} is not a plan that can be run:\n  - {listed}") from None


def shipped_plans() -> dict[str, Path]:
    """Return the plans that come with the program, by name."""
    here = Path(__file__).parents[1]
    # Installed, the plans lie inside the package; in a source tree, beside it.
    for folder in (here / "configs", here.parent / "configs"):
        found = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
        if found:
            return found
    return {}


def find_plan(source: str | Path) -> Path:
    """Return the file of a plan, given by path or by the name of a shipped one.

    Raises:
        ConfigError: There is no such file or name.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    shipped = shipped_plans()
    name = str(source)
    if name in shipped:
        return shipped[name]
    beside = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = _suggestion(name, [*shipped, *beside])
    raise ConfigError(
        f"expected a plan: a YAML file, or one of {', '.join(shipped) or 'no shipped plan'}, "
        f"got {printable(name)!r}, which does not exist{hint}"
    )


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, without the silent loss of a key that is written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping."""
        pairs = cast(Sequence[tuple[yaml.Node, yaml.Node]], node.value)
        seen: set[Any] = set()
        for key_node, _ in pairs:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = cast(object, cast(Any, self).construct_object(key_node, deep=True))
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"expected a text as key, got {key!r}", node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_PARTS: Mapping[str, type[BaseModel]] = {"kl": KLGrid, "tasks": TaskGrid}


def _problem(entry: Mapping[str, Any]) -> str:
    """One offence in words: where, what was expected, what came."""
    location = [part for place, part in enumerate(entry["loc"]) if part not in _PARTS or place != 2]
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")
    # Not repr: aliases of aliases can spell out billions of values.
    given = printable(reprlib.repr(entry.get("input")))
    given = given if len(given) <= 80 else given[:77] + "..."
    match entry["type"]:
        case "extra_forbidden":
            known = _known_keys(entry["loc"])
            return f"unknown key {where}{_suggestion(str(entry['loc'][-1]), known)}; known are {', '.join(known)}"
        case "missing":
            return f"{where}: expected a value, got none"
        case "union_tag_not_found":
            return f"{where}: expected `kind: kl` or `kind: tasks`, got none"
        case "union_tag_invalid":
            tag = str(entry["ctx"]["tag"])
            return f"{where}.kind: expected kl or tasks, got {printable(tag)!r}{_suggestion(tag, list(_PARTS))}"
        case "value_error":
            message = str(entry["ctx"]["error"])
            return f"{where}: {message}" if where else message
        case _:
            message = str(entry["msg"])
            return f"{where}: {message[0].lower()}{message[1:]}, got {given}"


def _known_keys(location: Sequence[str | int]) -> list[str]:
    part: type[BaseModel] = Plan
    if location[0] == "models":
        part = ModelEntry
    elif location[0] == "grids" and len(location) > 3:
        inside = len(location) > 4 and location[3] == "options"
        part = TaskOptions if inside else _PARTS[str(location[2])]
    return [field.alias or name for name, field in part.model_fields.items()]


def _suggestion(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
