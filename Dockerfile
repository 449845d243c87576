# docker build -t finetune . && docker run --gpus all -v "$PWD/runs:/data/runs" finetune launch --recipe llama31_8b_lora
FROM python:3.12-slim
# torch.compile and Triton need a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /finetune
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY finetune ./finetune
COPY recipes ./recipes
COPY accelerate_configs ./accelerate_configs
RUN pip install --no-cache-dir -e . -c constraints.txt
WORKDIR /data
ENTRYPOINT ["finetune"]
CMD ["--help"]
