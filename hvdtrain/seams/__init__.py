"""What hvdtrain uses of Keras and TensorFlow that they do not document: each name once, and whether it still holds."""
