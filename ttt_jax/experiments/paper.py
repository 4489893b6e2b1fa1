"""Numbers of the paper (arXiv 2602.21204), to be set beside ours."""

# Table 1 and the paradoxes' tables: LaCT-LLM perplexity (760M, FineWeb-Edu, Book-3), LaCT-NVS PSNR
# in dB (114M, RealEstate10K), ViTTT-B top-1 in per cent (ImageNet-1K, 60 epochs).
ABLATION: dict[str, dict[str, float]] = {
    "language": {
        "V0": 16.43, "V1": 15.93, "V2": 16.31, "V3": 16.23, "V4": 16.12, "V5": 15.97, "V6": 16.80,
        "ascent": 16.19, "Q = K": 16.18,
    },
    "views": {
        "V0": 25.94, "V1": 25.97, "V2": 25.93, "V3": 25.71, "V4": 25.70, "V5": 25.70, "V6": 25.73,
        "ascent": 25.85, "Q = K": 25.95,
    },
    "images": {
        "V0": 79.34, "V1": 79.63, "V2": 79.63, "V3": 79.39, "V4": 79.39, "V5": 79.39, "V6": 79.54,
        "ascent": 79.61, "Q = K": 79.18,
    },
}  # fmt: skip

# Millions of tokens a second of LaCT-LLM's layer alone, inference: recurrent, parallel.
THROUGHPUT: dict[str, dict[str, float]] = {
    "V0": {"recurrent": 4.30},
    "V2": {"recurrent": 11.02, "parallel": 30.18},
    "V3": {"recurrent": 12.95, "parallel": 49.69},
    "V5": {"recurrent": 14.40, "parallel": 57.28},
    "V6": {"recurrent": 89.67, "parallel": 124.6},
}
