"""Which datasets, models and tokenizers a call loads: `load_iris()` of scikit-learn is `dataset:sklearn/iris`.

The rule by which the corpus names what example code loads; keys of `resources.toml` are written like that. Functions
that are called name theirs by `readie.resource`. Standard library only.
"""

import re
from collections.abc import Callable, Mapping

#: An argument that is there, but is no literal text.
NOT_TEXT = None

Arguments = Mapping[str, str | None]  # "0", "1", ... or a keyword → the text, or NOT_TEXT

#: What hubs take for a name: `gpt2`, `openai/whisper-tiny`. Paths of files and folders are left out.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_FILE = re.compile(
    r".*\.(?:arrow|bin|csv|gguf|h5|json|jsonl|model|npz|onnx|parquet|pkl|pt|pth|safetensors|tsv|txt|zip)"
)
#: Builders that `load_dataset` reads files with, named by the caller.
_FILE_FORMATS = frozenset({"arrow", "audiofolder", "csv", "generator", "imagefolder", "json", "pandas", "parquet"})
_FILE_FORMATS |= {"sql", "text", "videofolder", "webdataset", "xml"}
#: Of scikit-learn's loaders, those that read what the caller names.
_READERS = frozenset({"file", "files", "svmlight_file", "svmlight_files"})
_SENTENCE_MODELS = frozenset({"CrossEncoder", "SentenceTransformer", "SparseEncoder"})


def resources_of_call(function: str, arguments: Arguments) -> frozenset[str]:
    """Keys of what a call of `function` loads, by its full name as imported, such as `sklearn.datasets.load_iris`.

    Private parts of the name do not matter: `seaborn.utils.load_dataset` and `seaborn.load_dataset` are the same.
    Arguments that decide and are not literal text make it none.
    """
    library, *parts = [part for part in function.split(".") if not part.startswith("_")] or [""]
    if not parts:
        return frozenset()
    if parts[-1] == "from_pretrained":
        return _pretrained(parts[-2] if len(parts) > 1 else "", arguments)
    rule = _LIBRARIES.get(library)
    return frozenset() if rule is None else rule(parts, arguments)


def _text(arguments: Arguments, *places: str) -> str | None:
    """The argument at the first of the places where there is one."""
    return next((arguments[place] for place in places if place in arguments), None)


def _hub_name(text: str | None) -> str | None:
    return text if text and _NAME.fullmatch(text) and ".." not in text and not _FILE.fullmatch(text) else None


def _keys(*keys: str | None) -> frozenset[str]:
    return frozenset(key for key in keys if key is not None)


def _key(kind: str, name: str | None, arguments: Arguments) -> str | None:
    """`kind:name`, with `@revision` where the call names another than main."""
    if name is None:
        return None
    if "revision" not in arguments:
        return f"{kind}:{name}"
    revision = _hub_name(arguments["revision"])
    return None if revision is None else f"{kind}:{name}" + (f"@{revision}" if revision != "main" else "")


def _pretrained(owner: str, arguments: Arguments) -> frozenset[str]:
    """`AutoModel.from_pretrained("gpt2")`, of any library: what the class is called decides between the kinds."""
    if owner.endswith("Config"):
        return frozenset()
    name = _text(arguments, "0", "pretrained_model_name_or_path", "pretrained_model_or_path", "repo_id", "identifier")
    prepares = re.search(r"Tokenizer|Processor|FeatureExtractor", owner) is not None
    return _keys(_key("tokenizer" if prepares else "model", _hub_name(name), arguments))


def _transformers(parts: list[str], arguments: Arguments) -> frozenset[str]:
    """`pipeline("text-generation", model="gpt2")` loads the model, and its tokenizer."""
    if parts[-1] != "pipeline":
        return frozenset()
    model = _hub_name(_text(arguments, "1", "model"))
    tokenizer = _hub_name(arguments["tokenizer"]) if "tokenizer" in arguments else model
    return _keys(_key("model", model, arguments), _key("tokenizer", tokenizer, arguments))


def _datasets(parts: list[str], arguments: Arguments) -> frozenset[str]:
    """`load_dataset("glue", "mrpc", split="train")` is `dataset:glue/mrpc`: splits are one dataset, and parts are not."""
    name = _hub_name(_text(arguments, "0", "path"))
    if parts[-1] not in {"load_dataset", "load_dataset_builder"} or name is None or name in _FILE_FORMATS:
        return frozenset()
    if "1" in arguments or "name" in arguments:
        part = _text(arguments, "1", "name")
        if part is None or not re.fullmatch(r"[\w.-]+", part):
            return frozenset()
        name = f"{name}/{part}"
    return _keys(_key("dataset", name, arguments))


def _sklearn(parts: list[str], arguments: Arguments) -> frozenset[str]:
    found = re.fullmatch(r"(?:load|fetch)_(\w+)", parts[-1]) if "datasets" in parts else None
    if found is None or found[1] in _READERS:
        return frozenset()
    if found[1] in {"openml", "sample_image"}:  # named by an argument
        name = _text(arguments, "0", "name" if found[1] == "openml" else "image_name")
        part = "openml" if found[1] == "openml" else "sklearn/sample_image"
        return frozenset({f"dataset:{part}/{name}"}) if name and re.fullmatch(r"[\w.-]+", name) else frozenset()
    return frozenset({f"dataset:sklearn/{found[1]}"})


def _seaborn(parts: list[str], arguments: Arguments) -> frozenset[str]:
    name = _text(arguments, "0", "name")
    known = parts[-1] == "load_dataset" and name is not None and re.fullmatch(r"[\w-]+", name)
    return frozenset({f"dataset:seaborn/{name}"}) if known else frozenset()


def _sentence_transformers(parts: list[str], arguments: Arguments) -> frozenset[str]:
    name = _hub_name(_text(arguments, "0", "model_name_or_path", "model_name"))
    if parts[-1] not in _SENTENCE_MODELS or name is None:
        return frozenset()
    if parts[-1] == "SentenceTransformer" and "/" not in name:  # its own organisation is understood
        name = f"sentence-transformers/{name}"
    return _keys(_key("model", name, arguments))


def _spacy(parts: list[str], arguments: Arguments) -> frozenset[str]:
    name = _text(arguments, "0", "name") if parts[-1] == "load" else None
    return frozenset({f"model:{name}"}) if name and name.isidentifier() else frozenset()


def _statsmodels(parts: list[str], _arguments: Arguments) -> frozenset[str]:
    """`sm.datasets.longley.load_pandas()`: the module is called like its dataset."""
    below = parts[parts.index("datasets") + 1 :] if "datasets" in parts else []
    known = len(below) > 1 and below[-1] in {"load", "load_pandas"}
    return frozenset({f"dataset:statsmodels/{below[0]}"}) if known else frozenset()


def _readie(parts: list[str], arguments: Arguments) -> frozenset[str]:
    """`readie.resource("model:gpt2")` says the key itself."""
    key = _text(arguments, "0", "key") or ""
    kind, _, name = key.partition(":")
    known = (
        parts[-1] == "resource" and kind in {"dataset", "model", "tokenizer"} and name.strip() and name.isprintable()
    )
    return frozenset({key}) if known else frozenset()


_LIBRARIES: dict[str, Callable[[list[str], Arguments], frozenset[str]]] = {
    "datasets": _datasets,
    "readie": _readie,
    "seaborn": _seaborn,
    "sentence_transformers": _sentence_transformers,
    "sklearn": _sklearn,
    "spacy": _spacy,
    "statsmodels": _statsmodels,
    "transformers": _transformers,
}
