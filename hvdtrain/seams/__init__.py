"""Undocumented names of Keras, TensorFlow and Horovod that hvdtrain uses: each is written once, and checked."""
