# The environment and the code: docker build -t humanline .; docker run --gpus all humanline train.py loss=dpo
# Without a GPU: docker build --build-arg REQUIREMENTS=requirements/cpu.txt -t humanline .
FROM python:3.12-slim
# torch.compile builds its kernels with a C++ compiler.
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*
WORKDIR /humanline
ARG REQUIREMENTS=requirements.txt
COPY requirements.txt ./
COPY requirements requirements
RUN pip install --no-cache-dir -r ${REQUIREMENTS}
COPY . .
ENTRYPOINT ["python"]
CMD ["train.py", "--help"]
