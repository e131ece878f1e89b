"""Image folders, torchvision's folders and Hugging Face data sets, on small files of the same formats made here."""

from __future__ import annotations

import gzip
import io
import pickle
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from coterie.errors import ConfigError
from coterie.experiment.data import DataConfig
from coterie.experiment.partition import Partition
from coterie_client.data import UserData, list_users, load_users, summarize_users

ADAPTER: TypeAdapter[Any] = TypeAdapter(DataConfig)
PARTS = ("features", "target", "test_features", "test_target")
TWO = {"by": "classes", "users": 2, "classes_per_user": 1}
RNG = np.random.default_rng(5)


def bits(user: UserData) -> tuple[Any, ...]:
    return (user.name, *((getattr(user, part).dtype.str, getattr(user, part).shape, getattr(user, part).tobytes()) for part in PARTS))


def independent_of_who_is_loaded(data: Any, folder: Path) -> list[UserData]:
    """All users, after a look that each has the same bits alone, and its head the number of its rows."""
    users = load_users(data, 0, None, folder)
    for user, head in zip(users, list_users(data, 0, folder), strict=True):
        assert bits(load_users(data, 0, [user.name], folder)[0]) == bits(user)
        assert (head.name, head.n_rows) == (user.name, len(user.target))
    return users


# ---- image folders


def write_image(path: Path, image: np.ndarray[Any, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def folder_of_images(root: Path, n: int = 4, classes: tuple[str, ...] = ("cat", "dog")) -> dict[str, np.ndarray[Any, Any]]:
    images = {f"{name}/{number}.png": RNG.integers(0, 256, (6, 5, 3), np.uint8) for name in classes for number in range(n)}
    for called, image in images.items():
        write_image(root / called, image)
    return images


def images(**more: Any) -> Any:
    return ADAPTER.validate_python({"source": "images", "path": "train", "test_fraction": 0, "partition": TWO, **more})


def test_a_folder_of_classes_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    written = folder_of_images(tmp_path / "train")
    tests = folder_of_images(tmp_path / "test", 2)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    users = independent_of_who_is_loaded(images(test_path="test"), tmp_path)
    for user in users:
        name = ["cat", "dog"][int(user.target[0])]
        assert np.array_equal(user.features, np.stack([written[f"{name}/{number}.png"].transpose(2, 0, 1) for number in range(4)]))
        assert np.array_equal(user.test_features, np.stack([tests[f"{name}/{number}.png"].transpose(2, 0, 1) for number in range(2)]))
    chosen = images(partition={"by": "classes", "users": 1, "classes_per_user": 1, "classes": ["dog"], "relabel": True})
    (user,) = load_users(chosen, 0, None, tmp_path)
    assert user.target.tolist() == [0, 0, 0, 0]
    assert np.array_equal(user.features[0], written["dog/0.png"].transpose(2, 0, 1))


def test_images_are_grey_or_resized_on_request(tmp_path: Path) -> None:
    folder_of_images(tmp_path / "train")
    write_image(tmp_path / "train" / "cat" / "9.png", RNG.integers(0, 256, (3, 4, 3), np.uint8))
    (user, _) = load_users(images(channels=1, resize=[7, 8]), 0, None, tmp_path)
    assert user.features.shape == (4, 1, 7, 8)
    write_image(tmp_path / "train" / "cat" / "0.png", RNG.integers(0, 256, (6, 5), np.uint8))
    assert load_users(images(resize=[7, 8]), 0, None, tmp_path)[0].features.shape == (4, 1, 7, 8)


def test_only_images_of_the_users_asked_for_are_opened(tmp_path: Path) -> None:
    folder_of_images(tmp_path / "train")
    (tmp_path / "train" / "dog" / "2.png").write_bytes(b"\x89PNG damaged")
    of_label = {next(iter(user.labels or {})): user.name for user in summarize_users(images(), 0, tmp_path)}
    assert len(load_users(images(), 0, [of_label[0.0]], tmp_path)) == 1
    with pytest.raises(ConfigError, match=r"^train: dog/2.png cannot be decoded \(.*\), want a JPEG or PNG image$"):
        load_users(images(), 0, [of_label[1.0]], tmp_path)


def test_wrong_folders_of_images_are_refused(tmp_path: Path) -> None:
    def refused(**more: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            load_users(images(**more), 0, None, tmp_path)
        return str(caught.value)

    assert refused() == "image folder 'train' is missing or no folder, want a folder of classes"
    (tmp_path / "train").mkdir()
    assert refused() == "image folder 'train' has 0 folders in it, want one for each class"
    folder_of_images(tmp_path / "train")
    folder_of_images(tmp_path / "test", 1, ("cat", "cow"))
    assert refused(test_path="test") == "image folder 'test' has the class 'cow', want only 'cat', 'dog'"
    (tmp_path / "train" / "emu").mkdir()
    assert refused() == "image folder 'train': class 'emu' has 0 images, want at least one .png or .jpg"
    write_image(tmp_path / "train" / "emu" / "0.png", np.zeros((4, 5, 3), np.uint8))
    one = {"by": "classes", "users": 1, "classes_per_user": 3}
    assert refused(partition=one) == "train: emu/0.png has 4x5 pixels and cat/0.png has 6x5, want one size"
    folder_of_images(tmp_path / "small", 1, ("cat", "dog", "emu"))
    assert refused(path="../train") == "data path '../train' leaves the data folder, want a path inside it"
    write_image(tmp_path / "grey" / "cat" / "0.png", np.zeros((6, 5), np.uint8))
    write_image(tmp_path / "grey" / "dog" / "0.png", np.zeros((6, 5), np.uint8))
    write_image(tmp_path / "grey" / "emu" / "0.png", np.zeros((6, 5), np.uint8))
    said = refused(path="small", test_path="grey", partition=one)
    assert said == "grey has test rows of shape [1, 6, 5], want [3, 6, 5] as training rows"


def test_each_user_may_have_a_folder_of_classes_and_labels_are_the_same_on_all_hosts(tmp_path: Path) -> None:
    ann = folder_of_images(tmp_path / "a" / "photos" / "ann")
    folder_of_images(tmp_path / "b" / "photos" / "bob", 3, ("dog",))
    folder_of_images(tmp_path / "b" / "tests" / "bob", 2, ("dog", "cat"))
    shutil.copytree(tmp_path / "a", tmp_path / "b", dirs_exist_ok=True)
    data = images(path="photos/{user}", classes=["dog", "cat"], channels=3, partition=None)
    users = independent_of_who_is_loaded(data, tmp_path / "b")
    assert [(user.name, user.target.tolist()) for user in users] == [("ann", [0] * 4 + [1] * 4), ("bob", [0] * 3)]
    for place, name in ((0, "dog"), (4, "cat")):
        assert np.array_equal(users[0].features[place], ann[f"{name}/0.png"].transpose(2, 0, 1))
    assert [bits(user) for user in load_users(data, 0, None, tmp_path / "a")] == [bits(users[0])]
    tested = load_users(data.model_copy(update={"test_path": "tests/{user}"}), 0, ["bob"], tmp_path / "b")
    assert tested[0].test_target.tolist() == [0, 0, 1, 1]
    few = data.model_copy(update={"partition": Partition(by="user", min_rows=4)})
    assert [head.name for head in list_users(few, 0, tmp_path / "b")] == ["ann"]


def test_wrong_folders_of_users_are_refused(tmp_path: Path) -> None:
    usual = {"path": "photos/{user}", "classes": ["cat", "dog"], "channels": 3, "partition": None}

    def refused(**more: Any) -> str:
        with pytest.raises((ConfigError, ValidationError)) as caught:
            load_users(images(**usual | more), 0, None, tmp_path)
        return str(caught.value)

    assert refused() == "data folder 'photos' is missing, want a folder with one folder per user"
    (tmp_path / "photos").mkdir()
    assert refused() == "data path 'photos/{user}' matches 0 folders, want one folder per user"
    folder_of_images(tmp_path / "photos" / "ann")
    assert refused(classes=["cat", "cow"]) == "image folder 'photos/ann' has the class 'dog', want only 'cat', 'cow'"
    write_image(tmp_path / "photos" / "bob" / "cat" / "0.png", np.zeros((4, 5, 3), np.uint8))
    assert refused() == "photos/{user}: bob/cat/0.png has 4x5 pixels and ann/cat/0.png has 6x5, want one size"
    assert "path has {user} and classes is missing, want the names of the class folders, so" in refused(classes=None)
    assert "path has {user} and channels is missing, want 1 or 3" in refused(channels=None)
    assert "classes names 'cat' twice" in refused(classes=["cat", "dog", "cat"])
    assert "want {user} once in both or in neither" in refused(test_path="tests")
    assert 'a folder for each user and path: "photos/{user}"' in refused(path="photos")
    assert "have no users: want classes or dirichlet" in refused(path="photos", partition={"by": "user"})


def test_a_link_out_of_the_data_folder_is_not_followed(tmp_path: Path) -> None:
    folder_of_images(tmp_path / "data" / "train")
    write_image(tmp_path / "secret.png", np.zeros((6, 5, 3), np.uint8))
    (tmp_path / "data" / "train" / "cat" / "x.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ConfigError, match=r"^data path 'train/cat/x.png' leaves the data folder, want a path inside it$"):
        list_users(images(), 0, tmp_path / "data")


# ---- torchvision's folders


def write_idx(path: Path, array: np.ndarray[Any, Any], *, zipped: bool) -> None:
    """Two zeros, the type 8 for bytes, the number of axes, then 32-bit extents, highest byte first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    if zipped:
        path.with_suffix(".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def write_mnist(folder: Path, *, zipped: bool = False) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    train, test = RNG.integers(0, 256, (8, 5, 4), np.uint8), RNG.integers(0, 256, (4, 5, 4), np.uint8)
    for prefix, block in (("train", train), ("t10k", test)):
        write_idx(folder / f"{prefix}-images-idx3-ubyte", block, zipped=zipped)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", np.arange(len(block), dtype=np.uint8) % 2, zipped=zipped)
    return train, test


def torchvision(dataset: str, **more: Any) -> Any:
    return ADAPTER.validate_python({"source": "torchvision", "path": ".", "dataset": dataset, "partition": TWO, **more})


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("dataset", "folder"), [("MNIST", "MNIST/raw"), ("FashionMNIST", "FashionMNIST/raw"), ("KMNIST", "")])
def test_idx_files_are_read_plain_and_zipped(tmp_path: Path, dataset: str, folder: str, zipped: bool) -> None:
    train, test = write_mnist(tmp_path / folder, zipped=zipped)
    for user in independent_of_who_is_loaded(torchvision(dataset), tmp_path):
        label = int(user.target[0])
        assert np.array_equal(user.features, train[label::2, np.newaxis])
        assert np.array_equal(user.test_features, test[label::2, np.newaxis])


def test_wrong_idx_files_are_refused(tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(ConfigError) as caught:
            load_users(torchvision("MNIST"), 0, None, tmp_path)
        return str(caught.value)

    assert refused() == "folder '.' has no MNIST/raw/train-images-idx3-ubyte, want the folder given to torchvision as root"
    write_mnist(tmp_path)
    labels, pixels = tmp_path / "train-labels-idx1-ubyte", tmp_path / "train-images-idx3-ubyte"
    good = labels.read_bytes()
    labels.write_bytes(good[:-1])
    assert refused() == "train-labels-idx1-ubyte has 7 labels for the 8 images of train-images-idx3-ubyte, want one for each"
    labels.write_bytes(good[:3])
    assert refused() == "train-labels-idx1-ubyte begins with the bytes [0, 0, 8], want [0, 0, 8, 1]: an IDX file of bytes with 1 axes"
    labels.write_bytes(good)
    pixels.write_bytes(pixels.read_bytes()[:-1])
    assert refused() == "train-images-idx3-ubyte cannot be read (it ends too early), want an IDX file"
    pixels.write_bytes(pixels.read_bytes()[:9])
    assert refused().startswith("train-images-idx3-ubyte cannot be read (unpack requires")
    write_mnist(tmp_path / "MNIST" / "raw", zipped=True)
    zipped = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    zipped.write_bytes(zipped.read_bytes()[:-20])
    assert refused().startswith("MNIST/raw/train-images-idx3-ubyte.gz cannot be read (")


class Python2Pickler(pickle._Pickler):
    """Writes text and bytes as Python 2 did, which made the published batches of CIFAR."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_string(self, value: str | bytes) -> None:
        raw = value.encode("latin1") if isinstance(value, str) else value
        head = bytes([len(raw)]) if len(raw) < 256 else struct.pack("<i", len(raw))
        self.write((pickle.SHORT_BINSTRING if len(raw) < 256 else pickle.BINSTRING) + head + raw)  # type: ignore[attr-defined]
        self.memoize(value)  # type: ignore[attr-defined]

    def save_global(self, value: Any, name: str | None = None) -> None:
        module, called = value.__module__, name or value.__name__
        self.write(pickle.GLOBAL + f"{module.replace('numpy._core', 'numpy.core')}\n{called}\n".encode())  # type: ignore[attr-defined]
        self.memoize(value)  # type: ignore[attr-defined]

    dispatch[str] = dispatch[bytes] = save_string
    dispatch[type] = dispatch[type(pickle.dumps)] = save_global


def python2(content: Any) -> bytes:
    buffer = io.BytesIO()
    Python2Pickler(buffer, 2).dump(content)
    return buffer.getvalue()


def python3(content: Any) -> bytes:
    return pickle.dumps({name.encode(): value for name, value in content.items()}, 4)


CIFARS = {
    "CIFAR10": ("cifar-10-batches-py", "cifar-10-batches-bin", [f"data_batch_{i}" for i in range(1, 6)], "test_batch", "labels"),
    "CIFAR100": ("cifar-100-python", "cifar-100-binary", ["train"], "test", "fine_labels"),
}


def cifar_rows(dataset: str) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Pixels (n, 3072) and labels of each file, the two classes in turn."""
    _, _, train, test, _ = CIFARS[dataset]
    return {name: (RNG.integers(0, 256, (4, 3072), np.uint8), np.arange(4) % 2) for name in [*train, test]}


def check_cifar(dataset: str, rows: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]], folder: Path) -> None:
    _, _, train, test, _ = CIFARS[dataset]
    pixels = np.concatenate([rows[name][0] for name in train]).reshape(-1, 3, 32, 32)
    for user in independent_of_who_is_loaded(torchvision(dataset), folder):
        label = int(user.target[0])
        assert np.array_equal(user.features, pixels[label::2])
        assert np.array_equal(user.test_features, rows[test][0].reshape(-1, 3, 32, 32)[label::2])


@pytest.mark.parametrize("dataset", CIFARS)
@pytest.mark.parametrize("pickled", [python2, python3])
def test_cifar_pickles_are_read(tmp_path: Path, dataset: str, pickled: Callable[[Any], bytes]) -> None:
    folder, _, _, _, key = CIFARS[dataset]
    rows = cifar_rows(dataset)
    (tmp_path / folder).mkdir()
    for name, (pixels, labels) in rows.items():
        content = {"batch_label": "a batch", key: labels.tolist(), "data": pixels, "filenames": ["a.png"] * 4}
        (tmp_path / folder / name).write_bytes(pickled(content))
    check_cifar(dataset, rows, tmp_path)


@pytest.mark.parametrize("dataset", CIFARS)
def test_cifars_binary_version_is_read(tmp_path: Path, dataset: str) -> None:
    _, folder, _, _, _ = CIFARS[dataset]
    rows = cifar_rows(dataset)
    (tmp_path / folder).mkdir()
    for name, (pixels, labels) in rows.items():
        coarse = np.full((4, 1 if dataset == "CIFAR100" else 0), 7, np.uint8)
        (tmp_path / folder / f"{name}.bin").write_bytes(np.hstack([coarse, labels[:, np.newaxis].astype(np.uint8), pixels]).tobytes())
    check_cifar(dataset, rows, tmp_path)
    (tmp_path / folder / f"{name}.bin").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"\.bin cannot be read \(cannot reshape.*\), want rows of CIFAR$"):
        list_users(torchvision(dataset), 0, tmp_path)


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"labels": Evil(exec, "raise SystemExit")}, "it asks for builtins.exec"),
        ({"labels": Evil(getattr, np.ndarray, "tofile")}, "it asks for builtins.getattr"),
        ({"labels": Evil(np.load, "x", None, True)}, "it asks for numpy.load"),
        ({"labels": Evil(subprocess.call, ["touch", "x"])}, "it asks for subprocess.call"),
    ],
)
def test_a_pickle_that_asks_for_more_than_arrays_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    for name in ("train", "test"):
        (tmp_path / "cifar-100-python" / name).write_bytes(pickle.dumps(content, 4))
    with pytest.raises(ConfigError, match=rf"cannot be read \({re.escape(said)}\), want a batch of CIFAR$"):
        list_users(torchvision("CIFAR100"), 0, tmp_path)


def test_wrong_batches_of_cifar_are_refused(tmp_path: Path) -> None:
    def refused(content: Any) -> str:
        for name in ("train", "test"):
            (tmp_path / "cifar-100-python" / name).write_bytes(pickle.dumps(content))
        with pytest.raises(ConfigError) as caught:
            load_users(torchvision("CIFAR100"), 0, None, tmp_path)
        return str(caught.value).removeprefix("cifar-100-python/")

    with pytest.raises(ConfigError, match=r"^folder '.' has neither cifar-100-python nor cifar-100-binary, want the folder given to torch"):
        list_users(torchvision("CIFAR100"), 0, tmp_path)
    (tmp_path / "cifar-100-python").mkdir()
    with pytest.raises(ConfigError, match=r"^data file 'cifar-100-python/t\w*' is missing"):
        list_users(torchvision("CIFAR100"), 0, tmp_path)
    assert refused(["no", "dictionary"]) == "test has no 'fine_labels', want a batch of CIFAR"
    assert refused({"fine_labels": [0.5, 1]}) == "test: 'fine_labels' is no list of labels, want whole numbers 0 to 255"
    assert refused({"fine_labels": [0, 300]}) == "test: 'fine_labels' is no list of labels, want whole numbers 0 to 255"
    assert refused({"fine_labels": [0, 1]}) == "train has no 'data', want a batch of CIFAR"
    for data in (np.zeros((1, 3072), np.uint8), np.zeros((2, 3071), np.uint8), np.zeros((2, 3072)), "text"):
        assert refused({"fine_labels": [0, 1], "data": data}).endswith("'data' is no array of a row of 3072 bytes for each label, want one")


# ---- Hugging Face data sets


def png(image: np.ndarray[Any, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


@pytest.fixture
def datasets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, without a network and with a cache of its own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


def huggingface(**more: Any) -> Any:
    return ADAPTER.validate_python({"source": "huggingface", "path": "set", "test_fraction": 0, "partition": {"by": "user"}, **more})


def image_set(datasets: Any, blocks: np.ndarray[Any, Any]) -> Any:
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"]), "who": datasets.Value("string")}
    )
    rows = [{"img": png(block), "label": number % 2, "who": f"w{number % 3}"} for number, block in enumerate(blocks)]
    return datasets.Dataset.from_list(rows, features=features)


@pytest.mark.parametrize("saved", [False, True])
def test_images_of_a_data_set_are_read_by_its_users(tmp_path: Path, datasets: Any, saved: bool) -> None:
    blocks = RNG.integers(0, 256, (9, 6, 5, 3), np.uint8)
    table = image_set(datasets, blocks)
    if saved:
        datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "set"))
    else:
        (tmp_path / "set").mkdir()
        table.to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
    users = independent_of_who_is_loaded(huggingface(image="img", user="who"), tmp_path)
    assert [user.name for user in users] == ["w0", "w1", "w2"]
    for number, user in enumerate(users):
        assert np.array_equal(user.features, blocks[number::3].transpose(0, 3, 1, 2))
        assert user.target.tolist() == [row % 2 for row in range(number, 9, 3)]
    chosen = {"by": "user", "classes": ["dog"], "relabel": True}
    assert {
        label for user in load_users(huggingface(image="img", user="who", partition=chosen), 0, None, tmp_path) for label in user.target
    } == {0}


def test_a_test_split_is_dealt_like_the_training_split(tmp_path: Path, datasets: Any) -> None:
    (tmp_path / "set").mkdir()
    train, test = RNG.integers(0, 256, (8, 6, 5), np.uint8), RNG.integers(0, 256, (4, 6, 5), np.uint8)
    image_set(datasets, train).to_parquet(tmp_path / "set" / "train.parquet")
    image_set(datasets, test).to_parquet(tmp_path / "set" / "test.parquet")
    for user in independent_of_who_is_loaded(huggingface(image="img", test_split="test", partition=TWO), tmp_path):
        assert np.array_equal(user.features, train[int(user.target[0]) :: 2, np.newaxis])
        assert np.array_equal(user.test_features, test[int(user.target[0]) :: 2, np.newaxis])


def test_texts_of_a_data_set_become_symbols(tmp_path: Path, datasets: Any) -> None:
    (tmp_path / "set").mkdir()
    text = 'text,mood,user\n"Good, good day",joy,a\nbad day,woe,a\nday,joy,b\n'
    (tmp_path / "set" / "train.csv").write_text(text)
    a, b = load_users(huggingface(text="text", label="mood", user="user", symbols=500, length=4), 0, None, tmp_path)
    assert a.features.dtype == np.int64
    assert a.target.tolist() == [0, 1]
    assert b.target.tolist() == [0]
    assert a.features[0, 0] == 0
    assert a.features[0, 1] == a.features[0, 2] != a.features[0, 3] == b.features[0, 3]


def test_wrong_data_sets_are_refused(tmp_path: Path, datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**more: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            load_users(huggingface(**({"text": "text", "label": "mood", "user": "user"} | more)), 0, None, tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refused() == "data folder 'set' is missing or no folder, want one that `datasets` reads"
    (tmp_path / "set").mkdir()
    assert refused().startswith("data set 'set', split 'train' cannot be loaded (")
    (tmp_path / "set" / "train.csv").write_text("text,mood,user,age\nday,joy,a,3\n")
    assert refused(split="dev").startswith("data set 'set', split 'dev' cannot be loaded (Unknown split")
    assert refused(label="moods") == "data set 'set': column 'moods' is missing, found 'text', 'mood', 'user', 'age'"
    assert refused(text=None, image="age").startswith("data set 'set': column 'age' has no images (")
    assert refused(text=None, image="text") == (
        "data set 'set', split 'train': row 1 cannot be decoded (No such file or directory), want a JPEG or PNG image"
    )
    (tmp_path / "set" / "train.csv").write_text("text,mood,user,age\n/etc/hostname,joy,a,3\n")
    assert refused(text=None, image="text") == "data path '/etc/hostname' leaves the data folder, want a path inside it"
    (tmp_path / "set" / "test.csv").write_text("text,mood,user,age\nday,fear,a,3\n")
    wanted = "the label is 'fear', want a whole number, or text that the training rows have"
    assert refused(test_split="test") == f"data set 'set', split 'test' row 1: {wanted}"
    assert refused(path="../x") == "data path '../x' leaves the data folder, want a path inside it"
    monkeypatch.chdir(tmp_path)
    assert refused(path=None, name="set") == "name is 'set', which is also a file or folder here, want path: for what is local"
    assert refused(path=None, name="nobody/nothing").startswith("data set 'nobody/nothing', split 'train' cannot be loaded (")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refused() == "data set 'set' needs datasets, which is not installed: pip install 'coterie[data]'"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"image": "img", "text": "text"}, "want one of image and text, found both"),
        ({}, "want one of image and text, found neither"),
        ({"image": "img", "name": "a/b"}, "want one of name and path, found both"),
        ({"image": "img", "name": "../b", "path": None}, "name"),
        ({"image": "img"}, "partition.by is 'user' and user is missing, want the column of users"),
    ],
)
def test_a_data_set_is_described_once(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        huggingface(**more)


def test_missing_pillow_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of_images(tmp_path / "train")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert len(list_users(images(), 0, tmp_path)) == 2
    with pytest.raises(ConfigError, match=r"^train holds images and needs Pillow, which is not installed: pip install 'coterie\[data\]'$"):
        load_users(images(), 0, None, tmp_path)
