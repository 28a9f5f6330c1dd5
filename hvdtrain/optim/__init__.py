"""The distributed optimizer and its hooks into Keras; fused SGD, EMA, loss scaling, the learning rate."""
