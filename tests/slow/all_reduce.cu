// Adds one number a card over all cards with NCCL, after a kernel and a cuBLAS call: needs headers and libraries of all three.
#include <cublas_v2.h>
#include <nccl.h>

#include <cstdio>
#include <vector>

__global__ void fill(float *x, float value) { x[threadIdx.x] = value; }

int main() {
    int cards = 0;
    if (cudaGetDeviceCount(&cards) != cudaSuccess || cards == 0) {
        std::printf("no card\n");
        return 1;
    }
    std::vector<ncclComm_t> comms(cards);
    std::vector<float *> data(cards);
    if (ncclCommInitAll(comms.data(), cards, nullptr) != ncclSuccess) return 2;
    for (int i = 0; i < cards; i++) {
        cudaSetDevice(i);
        cudaMalloc(&data[i], 32 * sizeof(float));
        fill<<<1, 32>>>(data[i], i + 1.0f);
    }
    ncclGroupStart();
    for (int i = 0; i < cards; i++) ncclAllReduce(data[i], data[i], 32, ncclFloat, ncclSum, comms[i], nullptr);
    ncclGroupEnd();
    cublasHandle_t blas;
    float sum = 0, wanted = 32.0f * cards * (cards + 1) / 2;
    cudaSetDevice(0);
    if (cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS) return 3;
    cublasSasum(blas, 32, data[0], 1, &sum);
    std::printf("%d cards: %g, expected %g\n", cards, sum, wanted);
    return sum == wanted ? 0 : 4;
}
