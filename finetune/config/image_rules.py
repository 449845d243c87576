"""The rules on rows with images, which are known once the data has been read. Imports no torch."""

from finetune.config.facts import Rule
from finetune.config.families import IMAGE_FAMILIES

RULES: tuple[Rule, ...] = (
    Rule(
        name="images of the family", keys=("model_name_or_path", "model_config"),
        when=lambda c: c.images and c.images not in IMAGE_FAMILIES,
        message="{name}: rows hold images, and training on images is not supported for {images}; it is tested with "
        f"{', '.join(IMAGE_FAMILIES)}",
        advice="remove these rows",
    ),
    Rule(
        name="images without the tower", keys=("drop_vision",), when=lambda c: c.images and c["drop_vision"],
        message="drop_vision: rows hold images, which need the vision tower", fix={"drop_vision": False},
    ),
    Rule(
        name="images in packed rows", keys=("attn_implementation", "packing"),
        when=lambda c: c.images and c["packing"] and c["attn_implementation"] != "auto",
        message="attn_implementation: {attn_implementation}: does not keep packed documents with images apart",
        fix={"packing": False},
    ),
    Rule(
        name="images of a method", keys=("method",),
        when=lambda c: c.images and (c.recipe.method_facts.rows == "ratings" or c.recipe.teacher is not None),
        message="method: {method}: rows hold images, which it does not support",
        advice="use method: sft, or one that learns from pairs",
    ),
    Rule(
        name="images in compiled layers", keys=("torch_compile",), when=lambda c: c.images and c["torch_compile"],
        message="torch_compile: rows hold images, with which it was not tried", fix={"torch_compile": False},
    ),
    Rule(
        name="images beyond the plan", keys=("datasets",), when=lambda c: c.images,
        message="rows hold images: the plan counts their tokens with the row's, and not what the vision tower needs "
        "while it runs, or keeps where it is trained",
        is_note=True,
    ),
)  # fmt: skip
