"""PyTorch's steps for gpu_steps.py.

    torch_gpu_steps.py TASK BATCH_SIZE PRECISION

Runs in a separate environment with torch and numpy. The networks have the layers of hvdtrain's synthetic tasks.
"""

import contextlib
import sys

import torch
from served_steps import serve
from torch import nn

CLASSES, TOKENS, VOCABULARY, WIDTH = 1000, 128, 8192, 256


def normalized(inputs, outputs, size, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2), nn.BatchNorm2d(outputs, momentum=0.01)
    )


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        first, second = normalized(inputs, width, 1, stride), normalized(width, width, 3)
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), normalized(width, 4 * width, 1))
        keeps_shape = inputs == 4 * width and stride == 1
        self.shortcut = nn.Identity() if keeps_shape else normalized(inputs, 4 * width, 1, stride)

    def forward(self, x):
        return nn.functional.relu(self.shortcut(x) + self.layers(x))


def resnet50():
    layers, inputs = [normalized(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if i == 0 and width > 64 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.dense = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS))

    def forward(self, x):
        x = self.tokens(x) + self.positions.weight
        return self.dense(self.blocks(x, mask=self.mask, is_causal=True)).movedim(-1, 1)


def main():
    task, batch_size, precision = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # As TensorFlow, which multiplies float32 on tensor cores.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    if task == "synthetic-resnet50":
        model = resnet50().to(device, memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x = torch.randn(batch_size, 3, 224, 224, device=device).contiguous(memory_format=torch.channels_last)
        y = torch.randint(CLASSES, (batch_size,), device=device)
    else:
        model = Transformer().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        x, y = (torch.randint(VOCABULARY, (batch_size, TOKENS), device=device) for _ in range(2))
    loss, scaler = nn.CrossEntropyLoss(), torch.amp.GradScaler(device, enabled=precision == "float16")

    def steps(num_steps):
        for _ in range(num_steps):
            optimizer.zero_grad(set_to_none=True)
            mixed = precision != "float32"
            with torch.autocast(device, getattr(torch, precision)) if mixed else contextlib.nullcontext():
                value = loss(model(x), y)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        if device == "cuda":
            torch.cuda.synchronize()

    serve(steps, {"device": device, "torch": torch.__version__})


main()
