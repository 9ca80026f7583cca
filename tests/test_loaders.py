"""Which datasets, models and tokenizers code loads, by key."""

import pytest

from readie.imports import imports_of_source
from readie.loaders import resources_of_call

CALLS = {
    # classes with from_pretrained, of any library: the class's name decides
    "from transformers import AutoModel\nAutoModel.from_pretrained('gpt2')": {"model:gpt2"},
    "import transformers as t\nt.BertForMaskedLM.from_pretrained('a/b', device_map='auto')": {"model:a/b"},
    "from transformers import AutoTokenizer as T\nT.from_pretrained('gpt2')": {"tokenizer:gpt2"},
    "from tokenizers import Tokenizer\nTokenizer.from_pretrained('bert-base-cased')": {"tokenizer:bert-base-cased"},
    "from transformers import AutoProcessor as P\nP.from_pretrained('openai/whisper-tiny')": {
        "tokenizer:openai/whisper-tiny"
    },
    "from transformers import AutoImageProcessor as P\nP.from_pretrained('x')": {"tokenizer:x"},
    "from transformers import AutoConfig\nAutoConfig.from_pretrained('gpt2')": set(),
    "from diffusers import DiffusionPipeline\nDiffusionPipeline.from_pretrained('a/b.c-1')": {"model:a/b.c-1"},
    "from transformers import AutoModel\nAutoModel.from_pretrained(pretrained_model_name_or_path='gpt2')": {
        "model:gpt2"
    },
    "from transformers import AutoModel\nAutoModel.from_pretrained('gpt2', revision='v1.0')": {"model:gpt2@v1.0"},
    "from transformers import AutoModel\nAutoModel.from_pretrained('gpt2', revision='main')": {"model:gpt2"},
    "from transformers import AutoModel\nAutoModel.from_pretrained('gpt2', revision=x)": set(),
    "from transformers import *\nAutoModel.from_pretrained('gpt2')": {"model:gpt2"},
    # files and folders of the caller's are not
    "from transformers import AutoModel\nAutoModel.from_pretrained('./model')": set(),
    "from transformers import AutoModel\nAutoModel.from_pretrained('/data/model')": set(),
    "from transformers import AutoModel\nAutoModel.from_pretrained('a/b/c')": set(),
    "from transformers import AutoModel\nAutoModel.from_pretrained('model.safetensors')": set(),
    "from transformers import AutoModel\nAutoModel.from_pretrained('a/../b')": set(),
    "from transformers import AutoModel\nAutoModel.from_pretrained('')": set(),
    "from transformers import AutoModel\nAutoModel.from_pretrained()": set(),
    "from transformers import AutoModel\nAutoModel.from_pretrained(*x, 'gpt2')": set(),
    "from transformers import AutoModel\nAutoModel.from_pretrained(f'{x}')": set(),
    "cls.from_pretrained('gpt2')": set(),
    # a variable counts where it is one literal text all along
    "from transformers import AutoModel\nNAME = 'gpt2'\ndef f():\n    return AutoModel.from_pretrained(NAME)": {
        "model:gpt2"
    },
    "from transformers import AutoModel\ndef f():\n    return AutoModel.from_pretrained(NAME)\nNAME = 'gpt2'": {
        "model:gpt2"
    },
    "from transformers import AutoModel\nn = 'a'\nn = 'b'\nAutoModel.from_pretrained(n)": set(),
    "from transformers import AutoModel\nn = 'a'\ndef f(n):\n    AutoModel.from_pretrained(n)": set(),
    "from transformers import AutoModel\nn = 'a'\nfor n in x:\n    AutoModel.from_pretrained(n)": set(),
    "from transformers import AutoModel\nn: str = 'a'\nn += 'b'\nAutoModel.from_pretrained(n)": set(),
    # pipelines
    "from transformers import pipeline\npipeline('text-generation', model='gpt2')": {"model:gpt2", "tokenizer:gpt2"},
    "import transformers\ntransformers.pipeline('ner', 'a/b', tokenizer='c')": {"model:a/b", "tokenizer:c"},
    "from transformers import pipeline\npipeline('ner')": set(),
    "from sentence_transformers import SentenceTransformer as S\nS('all-MiniLM-L6-v2')": {
        "model:sentence-transformers/all-MiniLM-L6-v2"
    },
    "import sentence_transformers as s\ns.SentenceTransformer('a/b')\ns.CrossEncoder('c')\ns.util.f('d')": {
        "model:a/b",
        "model:c",
    },
    "import spacy\nnlp = spacy.load('en_core_web_sm')": {"model:en_core_web_sm"},
    "import spacy\nnlp = spacy.load('./en')": set(),
    # datasets
    "from datasets import load_dataset\nload_dataset('imdb', split='train')": {"dataset:imdb"},
    "import datasets\ndatasets.load_dataset('glue', 'mrpc')": {"dataset:glue/mrpc"},
    "import datasets\ndatasets.load_dataset(path='glue', name='mrpc', revision='x')": {"dataset:glue/mrpc@x"},
    "import datasets\ndatasets.load_dataset('glue', task)": set(),
    "import datasets\ndatasets.load_dataset('csv', data_files='x.csv')": set(),
    "import datasets\ndatasets.load_from_disk('x')": set(),
    "from sklearn.datasets import load_iris\nX, y = load_iris(return_X_y=True)": {"dataset:sklearn/iris"},
    "from sklearn import datasets as d\nd.load_breast_cancer().data": {"dataset:sklearn/breast_cancer"},
    "import sklearn.datasets\nsklearn.datasets.fetch_20newsgroups(subset='train')": {"dataset:sklearn/20newsgroups"},
    "from sklearn.datasets import fetch_openml\nfetch_openml('mnist_784', version=1)": {"dataset:openml/mnist_784"},
    "from sklearn.datasets import fetch_openml\nfetch_openml(data_id=61)": set(),
    "from sklearn.datasets import load_sample_image\nload_sample_image('china.jpg')": {
        "dataset:sklearn/sample_image/china.jpg"
    },
    "from sklearn.datasets import *\nload_wine()\nmake_blobs()\nload_svmlight_file('x')": {"dataset:sklearn/wine"},
    "from sklearn.datasets import *\ndef load_mine(): ...\nload_mine()": set(),
    "from sklearn.datasets import load_iris": set(),
    "from sklearn.linear_model import load_x\nload_x()": set(),
    "import seaborn as sns\nsns.load_dataset('titanic')": {"dataset:seaborn/titanic"},
    "import seaborn as sns\nsns.load_dataset(name='penguins', cache=False)": {"dataset:seaborn/penguins"},
    "import seaborn as sns\nsns.load_dataset(x)\nsns.get_dataset_names()": set(),
    "import statsmodels.api as sm\nsm.datasets.longley.load_pandas().data": {"dataset:statsmodels/longley"},
    "from statsmodels.datasets import grunfeld\ngrunfeld.load()": {"dataset:statsmodels/grunfeld"},
    "import statsmodels.api as sm\nsm.datasets.get_rdataset('x')\nsm.load('x')": set(),
    # by key
    "from readie import resource\nresource('model:gpt2')": {"model:gpt2"},
    "import readie\nreadie.resource(key='dataset:my data')": {"dataset:my data"},
    "import readie\nreadie.resource('gpt2')\nreadie.resource('disk:x')\nreadie.resource('model: ')": set(),
    # other libraries' functions of the same names
    "import mylib\nmylib.load_dataset('x')\nmylib.load_iris()\nmylib.load('x')": set(),
}


@pytest.mark.parametrize(("source", "keys"), CALLS.items())
def test_loading_call_gives_its_key(source: str, keys: set[str]) -> None:
    """Literal arguments name what is loaded; anything else is not known, and left out."""
    assert imports_of_source(source, "x.py").resources == keys


def test_private_parts_of_a_functions_name_do_not_matter() -> None:
    """Where a function is defined says the same as where it is imported from."""
    assert resources_of_call("sklearn.datasets._base.load_iris", {}) == {"dataset:sklearn/iris"}
    assert resources_of_call("seaborn.utils.load_dataset", {"0": "mpg"}) == {"dataset:seaborn/mpg"}
    assert resources_of_call("_private", {}) == resources_of_call("", {}) == frozenset()
