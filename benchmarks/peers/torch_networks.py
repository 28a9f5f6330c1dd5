"""The benchmarks' networks in PyTorch, with the shapes of those in networks.py."""

from samples import VOCABULARY
from torch import nn


class Same(nn.Module):
    """Max pooling like Keras' padding="same" for even sizes."""

    def forward(self, x):
        return nn.functional.max_pool2d(nn.functional.pad(x, (0, 1, 0, 1), value=float("-inf")), 3, 2)


class Last(nn.Module):
    """An LSTM over texts, of which the last output counts."""

    def __init__(self, vocabulary=VOCABULARY, classes=10):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(vocabulary, 64), nn.LSTM(64, 64, batch_first=True)
        self.dense = nn.Linear(64, classes)

    def forward(self, x):
        return self.dense(self.lstm(self.embedding(x))[0][:, -1])


class Mean(nn.Module):
    """A transformer over texts, of which the mean output counts."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = nn.Embedding(VOCABULARY, 128), nn.Linear(128, 10)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.dense(self.encoder(self.embedding(x)).mean(1))


def cnn():
    first = (nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), Same(), nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), Same())
    dense = (nn.Linear(64 * 36, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10))
    return nn.Sequential(*first, nn.Flatten(), *dense)


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


NETWORKS = {"cnn": cnn, "mlp": mlp, "lstm": Last, "transformer": Mean}
