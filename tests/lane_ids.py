"""The ids of the lanes as they stand in traces and documents, written out: they are public and stay as they are."""

NATIVE_TEXT = "optimized-native-text"
NATIVE_MULTIMODAL = "optimized-native-multimodal"
GENERIC_TEXT = "transformers-generic-text"
GENERIC_MULTIMODAL = "transformers-generic-multimodal"
SEQ2SEQ_SOURCE = "transformers-generic-seq2seq-source"
