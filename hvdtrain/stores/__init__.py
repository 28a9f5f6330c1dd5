"""Object stores, such as S3, through fsspec: URLs, a folder's files, and local copies. Imports no TensorFlow."""
