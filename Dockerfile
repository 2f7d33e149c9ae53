# The command line with every store: docker build --tag hubplugin . && docker run --rm hubplugin --help
# To correct a file of yours: docker run --rm --volume "$PWD:/data" hubplugin apply faiss:photos.faiss --bank bank.npy
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY hubplugin hubplugin
COPY adapters adapters
RUN python -m pip install --no-cache-dir build && python -m build --wheel --outdir /wheel

# A service that searches and writes a corrected Qdrant collection, without torch:
# docker build --target serving --tag hubplugin-serving .
FROM python:3.12-slim AS serving
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheel /tmp/wheel
RUN python -m pip install --no-cache-dir --constraint /tmp/constraints.txt "$(ls /tmp/wheel/*.whl)[qdrant]" \
 && rm -rf /tmp/wheel /tmp/constraints.txt \
 && useradd --create-home user
USER user
ENTRYPOINT ["hubplugin"]
CMD ["--help"]

FROM python:3.12-slim
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheel /tmp/wheel
# The CPU build of torch: the default wheel brings gigabytes of CUDA.
RUN python -m pip install --no-cache-dir --constraint /tmp/constraints.txt \
      --index-url https://download.pytorch.org/whl/cpu torch \
 && python -m pip install --no-cache-dir --constraint /tmp/constraints.txt \
      "$(ls /tmp/wheel/*.whl)[fit,faiss,qdrant,tables]" \
 && rm -rf /tmp/wheel /tmp/constraints.txt \
 && useradd --create-home user
USER user
WORKDIR /data
ENTRYPOINT ["hubplugin"]
CMD ["--help"]
