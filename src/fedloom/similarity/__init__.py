"""How similar two networks are: by their activations on the same inputs, or by their weights.

    from fedloom.similarity import CKA, RBF, similarity, similarity_matrix

    similarity(a, b, inputs)                              # two networks, a number
    similarity_matrix(models, inputs, CKA(RBF(0.5)))      # many at once, one product a layer

It knows nothing of federated learning: networks are any `nn.Module`, inputs a batch.
"""

from fedloom.similarity.activations import Network, activations, layers_of
from fedloom.similarity.kernels import RBF, Kernel, Linear, Polynomial, kernel_named
from fedloom.similarity.measures import (
    CCA,
    CKA,
    DCKA,
    HSIC,
    MEASURES,
    Cosine,
    InnerProduct,
    Measure,
    Pearson,
    deconfounded,
    measure_named,
)
from fedloom.similarity.networks import similarity, similarity_matrix, weight_matrix
from fedloom.similarity.signatures import Signatures

__all__ = [
    "CCA",
    "CKA",
    "DCKA",
    "HSIC",
    "MEASURES",
    "RBF",
    "Cosine",
    "InnerProduct",
    "Kernel",
    "Linear",
    "Measure",
    "Network",
    "Pearson",
    "Polynomial",
    "Signatures",
    "activations",
    "deconfounded",
    "kernel_named",
    "layers_of",
    "measure_named",
    "similarity",
    "similarity_matrix",
    "weight_matrix",
]
