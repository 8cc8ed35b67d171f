"""Generated wire messages of qrnn-serve; edit the .proto and run protos/generate.py."""
