"""Sequence classifiers of Hugging Face's transformers: any name or folder that holds a model and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as experimental
from torch.nn.functional import linear

from gtracer.lab.data.batches import Batch
from gtracer.lab.data.task import Found, Split
from gtracer.lab.data.tokens import Tokens, tokens
from gtracer.lab.errors import LabError
from gtracer.lab.files import is_folder
from gtracer.lab.models import hub
from gtracer.lab.models.built import Architecture, Built

# Encoders that are handed the mask in the form that their attention wants. transformers' own way there waits for the
# device, to see whether there is any padding, or copies numbers to it: neither can be captured as a CUDA graph.
MASKED = ("bert", "mpnet", "roberta")
# The projections of the attention that kernels of our own can make, by the names that transformers gives them.
PROJECTIONS = {
    **dict.fromkeys(("BertSelfAttention", "RobertaSelfAttention"), ("query", "key", "value")),
    "MPNetSelfAttention": ("q", "k", "v"),
}


class Classifier(nn.Module):
    """A transformers model that takes a batch and gives its logits, as every other model here does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        config: Any = model.config
        self._masks = config.model_type in MASKED
        self._adds = config._attn_implementation == "eager"  # the mask to the scores; others take true and false
        self._compiling: Callable[[], AbstractContextManager[Any]] = nullcontext
        for module in model.modules():
            if hasattr(module, "compute_position_bias"):
                _share_positions(module)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if self._masks:
            batch = batch | {"attention_mask": self._mask(batch["attention_mask"])}
        with self._compiling():
            logits: Tensor = self.model(**batch).logits
        return logits

    def _mask(self, real: Tensor) -> Tensor:
        """Of attention, for texts whose tokens are `real`: every token looks at every real one."""
        seen = real[:, None, None, :].bool()
        if not self._adds:
            return seen
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, torch.finfo(torch.float32).min)

    def compile_layers(self) -> None:
        """Compile the layers that the model repeats: one is compiled, for all shapes, and the others are like it."""
        # Otherwise sizes that happen to be equal, 32 texts of 32 tokens, would be taken for one and the same.
        self._compiling = partial(experimental.patch, use_duck_shape=False)  # type: ignore[attr-defined]
        for module in list(self.modules()):
            for stack in module.children():
                if isinstance(stack, nn.ModuleList) and len({type(layer) for layer in stack}) == 1:
                    for layer in stack:
                        layer.compile(dynamic=True)

    def fuse_attention(self) -> None:
        """Let attention be made by kernels of our own."""
        if not self._masks:
            kind = self.model.config.model_type  # type: ignore[union-attr]
            raise LabError(f"fused kernels are for encoders of the kinds {', '.join(MASKED)}, not {kind}: use compiled")
        try:
            from gtracer.lab.kernels.attention import attention
        except ModuleNotFoundError as error:
            raise LabError(f"fused kernels need {error.name}: pip install triton, or use compiled") from error
        self._adds = True
        for module in self.modules():
            if names := PROJECTIONS.get(type(module).__name__):
                _attend_by(attention, module, *(getattr(module, name) for name in names))


def _attend_by(attention: Callable[..., Tensor], module: Any, *projections: nn.Linear) -> None:
    """Let the module's attention be made so, its three projections by one product."""

    def forward(x: Tensor, attention_mask: Tensor, position_bias: Tensor | None = None, **_: Any) -> tuple[Any, ...]:
        weight = torch.cat([projection.weight for projection in projections])
        made = linear(x, weight, torch.cat([projection.bias for projection in projections]))
        heads = made.view(*x.shape[:-1], 3, -1, module.attention_head_size)
        rate = module.dropout.p if module.training else 0.0
        mixed = attention(heads, attention_mask[:, 0, 0], position_bias, rate).flatten(2)
        return (module.o(mixed),) if hasattr(module, "o") else (mixed, None)

    module.forward = forward


def _share_positions(module: Any) -> None:
    """Let MPNet make its biases by position where it is, and once for all texts of a batch.

    transformers up to 5.17 copies positions from the CPU, and all of its versions repeat the biases for each text.
    """
    original = module.compute_position_bias

    def compute_position_bias(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        with x.device:
            made: Tensor = original(x[:1], *rest, **named)
        return made

    module.compute_position_bias = compute_position_bias


def build(name: str, classes: int, max_length: int) -> Built:
    """Load model and tokenizer; a head that does not fit the task is made anew."""
    library = transformers()
    is_here = is_folder(Path(name))
    with quiet(library), nullcontext() if is_here else hub.asked():
        local = is_here or hub.is_offline()
        tokenizer = _loaded(
            name, "tokenizer", lambda: library.AutoTokenizer.from_pretrained(name, local_files_only=local)
        )
        model, found = _loaded(
            name,
            "model",
            lambda: library.AutoModelForSequenceClassification.from_pretrained(
                name,
                num_labels=classes,
                ignore_mismatched_sizes=True,
                dtype=torch.float32,
                output_loading_info=True,
                local_files_only=local,
            ),
        )
    _check(name, tokenizer, model, found["missing_keys"])
    notes = list(_about_the_head(name, classes, found))
    return _built(Architecture("text", name, classes, max_length=max_length), tokenizer, model, notes)


def rebuilt(architecture: Architecture, folder: Path) -> Built:
    """One that was built before, without its weights: from what it has left in the folder."""
    library = transformers()
    with quiet(library):
        tokenizer = _loaded(str(folder), "tokenizer", lambda: library.AutoTokenizer.from_pretrained(folder))
        config = _loaded(str(folder), "configuration", lambda: library.AutoConfig.from_pretrained(folder))
        model = library.AutoModelForSequenceClassification.from_config(config)
    return _built(architecture, tokenizer, model, [])


def _built(architecture: Architecture, tokenizer: Any, model: Any, notes: list[str]) -> Built:
    limit = min(architecture.max_length, tokenizer.model_max_length, _positions(model))

    def batches(split: Split | Found, device: torch.device) -> Batch:
        assert isinstance(split.inputs, list)
        made: Tokens = tokens(tokenizer, split.inputs, limit).to(device)
        if made.cut:
            notes.append(f"{made.cut} of {len(split.inputs)} texts are longer than {limit} tokens and were cut")
        return made

    def save(folder: Path) -> None:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return Built(Classifier(model), batches, architecture, tuple(tokenizer.model_input_names), notes, save)


def transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise LabError(f"a text task needs {error.name}: pip install 'gtracer-optim[text]'") from error
    return transformers


def _loaded(name: str, what: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # a damaged folder can raise anything
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        is_away = not is_folder(Path(name)) and hub.is_offline()
        hint = "; offline, --model takes a folder that holds one" if is_away else ""
        raise LabError(f"model {name!r} could not be loaded, its {what}: {first}{hint}") from error


def _check(name: str, tokenizer: Any, model: Any, missing: set[str]) -> None:
    """Refuse what transformers lets through: an empty tokenizer, one of another model, an encoder without weights."""
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise LabError(f"model {name!r} comes without a tokenizer: put its tokenizer.json or vocab.txt into the folder")
    if len(tokenizer) > model.config.vocab_size:
        raise LabError(
            f"model {name!r} has a tokenizer of {len(tokenizer)} words for a model that knows {model.config.vocab_size}"
        )
    encoder = f"{model.base_model_prefix}."
    if lost := sorted(key for key in missing if key.startswith(encoder) and "pooler" not in key):
        raise LabError(f"model {name!r} lacks {len(lost)} weights of its encoder, such as {lost[0]}")
    if tokenizer.pad_token_id is None:
        raise LabError(f"model {name!r} has a tokenizer without a padding token, which batches of texts need")


def _about_the_head(name: str, classes: int, found: dict[str, Any]) -> Iterator[str]:
    other = [f"{key} of {' × '.join(map(str, theirs))}" for key, theirs, _ in found["mismatched_keys"]]
    other += [key for key in found["unexpected_keys"] if "position_ids" not in key and "pooler" not in key]
    what = f"{classes} classes" if classes > 1 else "a real number"
    if other:
        yield f"{name} has another task's head ({max(other)}): that for {what} starts anew"


def _positions(model: nn.Module) -> int:
    """How long a text the model itself takes: some count positions from the padding on."""
    config: Any = model.config
    places = getattr(config, "max_position_embeddings", None) or 1_000_000
    return int(places - 2 if config.model_type in ("roberta", "mpnet", "xlm-roberta", "camembert") else places)


@contextmanager
def quiet(library: Any) -> Iterator[None]:
    """What there is to say about loading is said here, in a line."""
    logging = library.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
