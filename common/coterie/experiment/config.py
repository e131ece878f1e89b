"""The experiment: one YAML file that describes a run entirely.

Frozen models; unknown keys, NaN and infinity are mistakes, and all mistakes are reported at once. Only the command line reads the
environment.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, PositiveFloat, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails

from coterie.errors import ConfigError
from coterie.experiment import plugins
from coterie.experiment.compress import why_not_thin
from coterie.experiment.data import SOURCES, DataConfig, PythonData
from coterie.experiment.federation import Count, FederationRules, Seconds
from coterie.experiment.method import ANY_MODEL, CONVEX, NETWORK, Kind, Meaningless
from coterie.experiment.model import CustomModel, ModelConfig
from coterie.experiment.overrides import apply_overrides
from coterie.experiment.privacy import Privacy, refused
from coterie.experiment.problem import ProblemConfig
from coterie.experiment.reveals import why_not_masked
from coterie.experiment.robust import why_not_robust
from coterie.experiment.settings import Settings
from coterie.registry import is_built_in, is_method, method, methods, unknown_method, written
from coterie.text.quoting import quoted, shortened
from coterie.text.suggestions import keys_at, method_of, suggestion, tags_of

MAX_ROUNDS = 10**9
MAX_SEED = 2**63 - 1
_MAX_MISTAKES = 20  # reported at once
_MAX_MISTAKE, _MAX_KEY = 1000, 100  # characters

PackageName = Annotated[str, Field(pattern=plugins.PACKAGE)]
PackageVersion = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.!+_-]{0,99}$")]

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
_WORD = re.compile(r"'([^']*)'")
_PATTERNS = {_NAME: "at most 100 letters, digits, dots, hyphens and underscores, of which the first is a letter or a digit"}
# By prefix of pydantic's error type; the first match counts.
_WANTED = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
    "finite_number": "a finite number",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string": "text",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
    "tuple": "a list",
    "list": "a list",
    "model": "a mapping",
    "dict": "a mapping",
}


def _a_reference(name: str) -> str:
    """ValueError unless it is the name of a method that may run beside others."""
    if not (is_method(name) and method(name).is_reference):
        listed = [other for other in methods() if method(other).is_reference]
        raise ValueError(f"is {quoted(name)}, want one of {', '.join(listed)}{suggestion(name, listed)}")
    return name


class StopRule(Settings):
    """When a stage ends: at the first rule that holds."""

    rounds: Annotated[int, Field(ge=1, le=MAX_ROUNDS)] = 2000  #: The most rounds of a stage.
    #: A stage ends when both relative residuals of the method are at most this, for methods that have them. Smaller is more exact and takes
    #: more rounds. null, the default beside `objective_gap`, switches it off.
    residual: PositiveFloat | None = 1e-6
    #: A stage ends when (objective - reference_objective) / |reference_objective| is at most this. It needs `reference_objective`.
    objective_gap: PositiveFloat | None = None
    reference_objective: float | None = None  #: The optimal value of the objective, known from elsewhere.
    #: With `privacy`: a stage ends before the round that would spend more than this epsilon.
    epsilon: PositiveFloat | None = None
    #: The most seconds of a stage. The clock decides, so the round at which it ended is recorded, and can be replayed.
    wall_time_s: Seconds | None = None

    @model_validator(mode="before")
    @classmethod
    def _a_gap_stands_alone(cls, content: Any) -> Any:
        has_gap = isinstance(content, Mapping) and content.get("objective_gap") is not None
        return {"residual": None, **content} if has_gap else content

    @model_validator(mode="after")
    def _gap_needs_a_reference(self) -> Self:
        if (self.objective_gap is None) != (self.reference_objective is None):
            raise ValueError("objective_gap and reference_objective belong together: give both or neither")
        return self


class Snapshots(Settings):
    """How often every process saves its state, whichever comes first. The result does not depend on it.

    Messages between two snapshots are kept in memory and replayed.
    """

    every_rounds: Count = 100  #: Rounds between two snapshots.
    every_s: Seconds = 60.0  #: Seconds between two snapshots. Rare snapshots cost less, and a killed process has more to repeat.
    #: A snapshot is also due when the messages kept since the last one exceed this many bytes.
    max_log_bytes: Annotated[int, Field(ge=1, le=1 << 50)] = 256 << 20


class Experiment(Settings):
    """A run, entirely."""

    name: Annotated[str, Field(pattern=_NAME)]  #: Name of the run: that of its folder in `runs`, of reports and of dashboards.
    description: str = ""  #: A sentence about the experiment, for readers.
    #: Seed of everything random. The same seed gives the same bits, however many processes take part.
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    data: DataConfig  #: Where users' rows come from. The keys depend on `data.source`.
    model: ModelConfig | None = None  #: The users' network, for methods that train one; null for convex problems.
    problem: ProblemConfig  #: The loss that users minimise. Networks have cross-entropy unless it says otherwise.
    #: Differential privacy: what is clipped, and how much noise is added. null: none, and numbers of users are sent as they are.
    privacy: Privacy | None = None
    method: Any  #: The method and its settings: `name`, and the keys on the method's own page.
    #: Methods that run first on the same users, to compare with: `local`, `global` or `oracle`. They cost traffic of their own.
    references: tuple[Annotated[str, AfterValidator(_a_reference)], ...] = ()
    stop: StopRule = StopRule()  #: When a stage ends.
    #: Number format of vectors on the wire. Fewer bits mean less traffic and less precision. Networks send float32 or half of it.
    payload: Literal["float64", "float32", "float16", "bfloat16"] = "float64"
    #: Whether hosts send one sum of their users' answers instead of each answer, for methods that use nothing else. Such sums are exact in
    #: any order. Results differ from those of `false` in their last digits.
    exact_sums: bool = False
    #: Whether users judge the final models of each stage on their training and held-out rows. Its traffic is booked as step `evaluate`.
    evaluate: bool = True
    #: Whether users also send second moments of their rows after stages whose theory gives standard errors, for `coterie coefficients`.
    #: Booked as step `inference`.
    inference: bool = False
    federation: FederationRules = FederationRules()  #: Who must take part, and how long to wait.
    snapshots: Snapshots = Snapshots()  #: How often each process saves its state.
    #: Versions of the installed packages whose code takes part, by name. A run fills it in, and refuses hosts with other versions.
    packages: Annotated[dict[PackageName, PackageVersion], Field(max_length=100)] = Field(default_factory=dict, validate_default=True)

    @property
    def judges_training_rows(self) -> bool:
        """Whether users judge final models on their training rows too. Where these are protected they do not: scores have no noise."""
        return self.evaluate and (self.privacy is None or not self.privacy.is_of_hosts)

    @model_validator(mode="before")
    @classmethod
    def _some_methods_have_a_loss(cls, content: Any) -> Any:
        if not isinstance(content, Mapping) or "problem" in content:
            return content
        section = content.get("method")
        name = section.get("name") if isinstance(section, Mapping) else None
        found = method(name) if isinstance(name, str) and is_method(name) else None
        if found is not None and found.problem is not None:
            return {**content, "problem": dict(found.problem)}
        of_models = CONVEX if found is None else found.models
        if content.get("model") is None and of_models == ANY_MODEL:
            wanted = "a key 'model', such as model: {name: mlp, classes: 10}, or a key 'problem', such as problem: {loss: logistic}"
            raise ValueError(f"method {name!r} trains a network or solves a convex problem: want {wanted}")
        is_network = content.get("model") is not None or of_models == NETWORK
        return {**content, "problem": {"loss": "cross_entropy"}} if is_network else content

    @model_validator(mode="after")
    def _nothing_is_sent_without_noise(self) -> Self:
        if sentence := refused(self) or why_not_thin(self):
            raise ValueError(sentence)
        return self

    @model_validator(mode="after")
    def _model_and_method_fit(self) -> Self:
        name, is_network = self.method.name, self.model is not None
        models, meaningless = method(name).models, method(name).meaningless.get("network" if is_network else "convex", Meaningless())
        if not is_network and "convex" not in models:
            said = f"method {name!r} trains a network, but there is no key 'model': want one, such as model: {{name: mlp, classes: 10}}"
            raise ValueError(said)
        if is_network and "network" not in models:
            raise ValueError(f"method {name!r} trains no network, but there is a model: want one of {', '.join(methods('network'))}")
        has_meaning = any(getattr(self.method, key, None) == value for key, value in meaningless.unless.items())
        for key in () if has_meaning else meaningless.keys:
            found, default = getattr(self.method, key), type(self.method).model_fields[key].default
            if found != default:  # a key without meaning for this kind of models is set
                plain = found.model_dump() if isinstance(found, BaseModel) else found
                raise ValueError(f"method.{key} is {quoted(plain)}, but {meaningless.why}: want no such key")
        fits_both = self.problem.is_own or (is_network and self.problem.loss == "least_squares")
        if self.problem.is_for_networks != is_network and not fits_both:
            wanted = "cross_entropy or least_squares" if is_network else "the loss of a convex problem"
            raise ValueError(f"method {name!r} has the loss {self.problem.loss!r}, want {wanted}")
        target = "target" if hasattr(self.data, "target") else "target_column"
        if is_network and getattr(self.data, target, "") is None and getattr(self.data, "formula", None) is None:
            raise ValueError(f"data.{target} is missing, but networks learn targets: want the name of what holds them")
        if is_network and self.problem.l2:
            raise ValueError(f"problem.l2 is {self.problem.l2:g}, but networks are penalised by method.optimizer.weight_decay: want that")
        if is_network and (self.data.standardize or self.references):
            raise ValueError("standardize and references are for convex problems: want neither beside a model (see model.input_mean)")
        if is_network and self.data.fills_missing:
            raise ValueError("data.missing: mean and indicator are for convex problems: want refuse or drop_rows beside a model")
        if not is_network and self.payload in ("float16", "bfloat16"):
            raise ValueError(f"payload {self.payload!r} is for the weights of networks, want float64 or float32")
        return self

    @model_validator(mode="after")
    def _the_method_uses_sums(self) -> Self:
        kind: Kind = "convex" if self.model is None else "network"
        if self.exact_sums and kind not in method(self.method.name).sums:
            listed = [name for name in methods(kind) if kind in method(name).sums]
            said = f"exact_sums is true, but method {self.method.name!r} uses the answer of each user"
            raise ValueError(f"{said}: want false, or one of {', '.join(listed)}")
        if self.exact_sums and self.federation.has_peers:
            raise ValueError("exact_sums is true, but with topology 'peers' aggregators see each other's sums: want topology 'clusters'")
        return self

    @property
    def masks_sums(self) -> bool:
        """Whether parents see the totals of their members' sums alone."""
        return self.federation.sums == "masked"

    @model_validator(mode="after")
    def _masks_hide_something(self) -> Self:
        if self.masks_sums and (fault := why_not_masked(self)):
            raise ValueError(f"federation.sums is 'masked', but {fault}")
        return self

    @model_validator(mode="after")
    def _a_rule_has_answers(self) -> Self:
        if fault := why_not_robust(self):
            raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _inference_has_a_theory(self) -> Self:
        if not self.inference:
            return self
        if self.model is not None:
            raise ValueError("inference is true, but networks have no standard errors: want false beside a model")
        if self.problem.is_distance:
            raise ValueError(f"inference is true, but the loss {self.problem.loss} has no targets: want false, or a loss with targets")
        if not (method(self.method.name).intervals(self.method) or any(method(name).intervals(None) for name in self.references)):
            raise ValueError(
                f"inference is true, but no stage of method {self.method.name!r} has standard errors: a penalty biases its models. "
                "Want false, a refit (pdmm: method.refit), or references such as local and global"
            )
        return self

    @field_validator("method", mode="before")
    @classmethod
    def _method_by_name(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, BaseModel):
            return value
        if not isinstance(value, Mapping) or "name" not in value:
            raise ValueError(f"want a mapping with a name, one of {', '.join(methods())}")
        name = value["name"]
        if not is_method(name):
            raise ValueError(unknown_method(name))
        found = method(name)
        if info.data.get("model") is None:
            value = {**found.convex_defaults, **value}
        if (privacy := info.data.get("privacy")) is not None:
            without = () if info.data.get("model") is None else found.meaningless.get("network", Meaningless()).keys
            value = {**{key: one for key, one in found.private_defaults(privacy).items() if key not in without}, **value}
        return found.config.model_validate({**value, "name": found.name})  # which may have been an import path

    @field_validator("packages")
    @classmethod
    def _those_that_take_part(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        return plugins.packages_of(_named(info.data), value)


def _named(sections: Mapping[str, Any]) -> Iterator[tuple[plugins.Kind, str]]:
    """All names in an experiment that are not built in: losses, sources, models, compressors, rules, partitions and methods."""
    problem, data, model, hyper = (sections.get(key) for key in ("problem", "data", "model", "method"))
    if problem is not None and problem.is_own:
        yield "loss", problem.loss
    if isinstance(data, PythonData):
        yield "source", data.path
    if isinstance(model, CustomModel):
        yield "model", model.build
    thin = None if sections.get("federation") is None else sections["federation"].compress
    for rule in (None, None) if thin is None else (thin.up, thin.down):
        if rule is not None and rule.by is not None:
            yield "compressor", rule.by
    robust = None if sections.get("federation") is None else sections["federation"].robust
    if robust is not None and robust.is_own:
        yield "rule", robust.rule
    partition = getattr(data, "partition", None)
    if partition is not None and partition.is_own:
        yield "partition", partition.by
    if hyper is not None and not is_built_in(hyper.name):
        yield "method", written(hyper.name)


def named_code(experiment: Experiment) -> list[str]:
    """The import paths in an experiment, of code that its hosts import."""
    return [name for kind, name in _named(dict(experiment)) if plugins.is_path(name) and kind != "rule"]  # which runs at the server alone


def experiment_from(content: Any, where: str = "the experiment") -> Experiment:
    """The experiment in a mapping. ConfigError with all mistakes, each with its place and the value found."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} is a {type(content).__name__}, want a mapping with name, data, problem and method")
    plugins.check_installed(content.get("packages"))  # before the names that they give are unknown
    try:
        return Experiment.model_validate(content)
    except ValidationError as error:
        raise ConfigError(shortened(f"{where}: {_sentences(error, method_of(content))}")) from None


def experiment_to_json(experiment: Experiment) -> str:
    """The experiment as canonical JSON; `experiment_from(json.loads(...))` is the inverse."""
    content = experiment.model_dump(mode="json", exclude={"method"})
    content["method"] = {**experiment.method.model_dump(mode="json"), "name": written(experiment.method.name)}
    if not experiment.packages:
        del content["packages"]
    return json.dumps(content, sort_keys=True)


def as_written(experiment: Experiment) -> dict[str, Any]:
    """Only the keys set by its file and overrides; `experiment_from` is the inverse."""
    content = experiment.model_dump(mode="json", exclude={"method"}, exclude_unset=True)
    method = experiment.method.model_dump(mode="json", exclude_unset=True)
    return {**content, "method": {**method, "name": written(experiment.method.name)}}


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads a YAML file and applies `--set` overrides such as "method.penalty=0.05"."""
    from coterie.text import yaml_text  # noqa: PLC0415 - a client never reads YAML, and stays smaller without

    try:
        with path.open("rb") as file:
            content = file.read(yaml_text.MAX_BYTES + 1)
        text = content.decode("utf-8", "strict" if len(content) <= yaml_text.MAX_BYTES else "replace")  # the limit may cut a character
    except OSError as error:
        raise ConfigError(f"cannot read the experiment {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    content = yaml_text.parsed(text, str(path))
    if content is None:
        raise ConfigError(f"{path} is empty, want an experiment with name, data, problem and method")
    return experiment_from(apply_overrides(content, overrides), str(path))


def _sentences(error: ValidationError, name: str | None) -> str:
    listed = error.errors(include_url=False)
    inside = {item["loc"][:length] for item in listed for length in range(len(item["loc"]))}
    # pydantic counts the items that are right, so a list of wrong ones is called too short besides.
    mistakes = [item for item in listed if not (item["type"] == "too_short" and item["loc"] in inside)]
    more = [f"and {len(mistakes) - _MAX_MISTAKES} more mistakes"] if len(mistakes) > _MAX_MISTAKES else []
    return "; ".join([*(_sentence(item, name) for item in mistakes[:_MAX_MISTAKES]), *more])


def _sentence(item: ErrorDetails, name: str | None) -> str:
    """One mistake: its place, and what is wrong with the value."""
    kind, keys = item["type"], list(item["loc"])
    if keys[:1] in (["data"], ["model"]):
        del keys[1:2]  # pydantic names the chosen source or model there, which is no key of the file
    if keys[:2] == ["data", "columns"]:
        del keys[3:4]  # and here whether the type is a word or a mapping
    if kind.startswith("union_tag"):
        keys.append("name" if keys[:1] == ["model"] else "source")
    place = ".".join(shortened(str(key), _MAX_KEY) for key in keys)
    return shortened(f"{place or 'the experiment'}: {complaint(item, name)}", _MAX_MISTAKE)


def complaint(item: ErrorDetails, name: str | None = None) -> str:
    """What is wrong with a value, in our words instead of pydantic's: "is 3, want less than 1". `name` is the method, for its keys."""
    kind, context = item["type"], item.get("ctx", {})
    match kind:
        case "value_error":
            return item["msg"].removeprefix("Value error, ")
        case "extra_forbidden":
            config = method(name).config if name is not None and is_method(name) else None
            known = keys_at(Experiment, item["loc"][:-1], config)
            said, listed = f"unknown key{suggestion(item['loc'][-1], known)}", ", ".join(known)
            if known and item["loc"][:-1] == ("method",):
                return f"{said} (coterie help {name} explains the keys: {listed})"
            return said if said.endswith("?") or not known else f"{said}, want one of {listed}"
        case "missing":
            return "is missing"
        case "union_tag_not_found":
            return f"is missing, want one of {', '.join(_tags(item))}"
        case "union_tag_invalid":
            return f"is {quoted(context['tag'])}, want one of {', '.join(_tags(item))}{suggestion(context['tag'], _tags(item))}"
        case "literal_error":
            return f"is {quoted(item['input'])}, want {context['expected']}{suggestion(item['input'], _WORD.findall(context['expected']))}"
        case "string_pattern_mismatch":
            return f"is {quoted(item['input'])}, want {_PATTERNS.get(context['pattern'], 'text that matches ' + context['pattern'])}"
    wanted = next((wanted.format(**context) for start, wanted in _WANTED.items() if kind.startswith(start)), item["msg"])
    return f"is {quoted(item['input'])}, want {wanted}"


def _tags(item: ErrorDetails) -> Sequence[str]:
    """The names of the sources, or of the models."""
    is_model = item["loc"][:1] == ("model",)
    return [*(tags_of(ModelConfig) if is_model else SOURCES), *plugins.names("model" if is_model else "source")]
